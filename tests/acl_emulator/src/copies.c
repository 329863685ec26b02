/* Asynchronous copies, one by one and in batches. ACL_EMULATOR_BATCH_LIMIT: descriptors a batch may have (4096);
 * ACL_EMULATOR_BATCH=unsupported: the call exists and the device refuses it (207000). */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "emulator.h"

static int break_batch_after, break_batch_code; /* guarded by emu_lock */

void emu_break_batch(int after, int code) {
    pthread_mutex_lock(&emu_lock);
    break_batch_after = after;
    break_batch_code = code;
    pthread_mutex_unlock(&emu_lock);
}

static uint64_t mix(uint64_t hash, const void *bytes, size_t size) {
    const unsigned char *at = bytes;
    for (size_t i = 0; i < size; i++) {
        hash = (hash ^ at[i]) * 1099511628211u;
    }
    return hash;
}

uint64_t emu_fingerprint(void **dsts, void **srcs, const size_t *sizes, size_t count) {
    uint64_t hash = mix(14695981039346656037u, dsts, count * sizeof *dsts);
    return mix(mix(hash, srcs, count * sizeof *srcs), sizes, count * sizeof *sizes);
}

static bool copy_one(void *dst, const void *src, size_t size, aclError *failed) {
    int delay = emu_copy_delay_us();
    if (delay > 0) {
        usleep((useconds_t)delay);
    }
    *failed = emu_copy_fault();
    if (*failed == ACL_SUCCESS) {
        memcpy(dst, src, size);
    }
    return *failed == ACL_SUCCESS;
}

void emu_run_copy(const emu_copy *copy, aclError *failed) {
    static _Thread_local uint64_t seed = 88172645463325252u;
    if (copy->dsts == NULL) {
        copy_one(copy->dst, copy->src, copy->size, failed);
        return;
    }
    if (emu_fingerprint(copy->dsts, copy->srcs, copy->sizes, copy->count) != copy->fingerprint) {
        *failed = ACL_ERROR_RT_DRV_INTERNAL_ERROR; /* the arrays were given back before the copy had run */
        return;
    }
    /* The order inside a batch is not promised: a random one. */
    size_t *order = malloc(copy->count * sizeof *order);
    if (order == NULL) {
        *failed = ACL_ERROR_RT_MEMORY_ALLOCATION;
        return;
    }
    for (size_t i = 0; i < copy->count; i++) {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        size_t other = (size_t)(seed % (i + 1));
        order[i] = order[other];
        order[other] = i;
    }
    for (size_t i = 0; i < copy->count; i++) {
        size_t at = order[i];
        if (!copy_one(copy->dsts[at], copy->srcs[at], copy->sizes[at], failed)) {
            break;
        }
    }
    free(order);
}

/* Does each side lie where the direction says? */
static bool matches(const void *dst, const void *src, size_t size, aclrtMemcpyKind kind) {
    if (kind == ACL_MEMCPY_HOST_TO_DEVICE) {
        return emu_is_device(dst, size) && !emu_touches_device(src, size);
    }
    return kind == ACL_MEMCPY_DEVICE_TO_HOST && emu_is_device(src, size) && !emu_touches_device(dst, size);
}

/* Pageable host memory: the call waits for the stream and copies itself, as documented. */
static aclError submit(emu_stream *stream, const emu_copy *copy, bool pinned) {
    if (pinned) {
        emu_enqueue_copy(stream, copy);
        return ACL_SUCCESS;
    }
    aclError failed = emu_drain(stream, -1);
    if (failed == ACL_SUCCESS) {
        pthread_mutex_unlock(&emu_lock);
        emu_run_copy(copy, &failed);
        pthread_mutex_lock(&emu_lock);
    }
    return failed;
}

aclError aclrtMemcpyAsync(void *dst, size_t dst_max, const void *src, size_t count, aclrtMemcpyKind kind,
                          aclrtStream stream_handle) {
    EMU_ENTER("aclrtMemcpyAsync");
    pthread_mutex_lock(&emu_lock);
    emu_stream *stream = NULL;
    aclError code = emu_find_stream(stream_handle, &stream);
    if (code == ACL_SUCCESS && (dst == NULL || src == NULL || count == 0 || count > dst_max)) {
        code = emu_error(ACL_ERROR_RT_PARAM_INVALID, "dst=%p dst_max=%zu src=%p count=%zu", dst, dst_max, src, count);
    } else if (code == ACL_SUCCESS && !matches(dst, src, count, kind)) {
        code = emu_error(ACL_ERROR_RT_PARAM_INVALID, "dst=%p src=%p are not as kind %d says", dst, src, (int)kind);
    }
    bool pinned = false;
    if (code == ACL_SUCCESS) {
        pinned = emu_is_pinned(kind == ACL_MEMCPY_HOST_TO_DEVICE ? src : dst, count);
        emu_copy copy = {.dst = dst, .src = (void *)src, .size = count};
        code = submit(stream, &copy, pinned);
    }
    pthread_mutex_unlock(&emu_lock);
    return emu_done("aclrtMemcpyAsync", code, "kind=%d count=%zu pinned=%d", (int)kind, count, pinned);
}

#ifndef WITHOUT_BATCH
static size_t batch_limit(void) {
    const char *given = getenv("ACL_EMULATOR_BATCH_LIMIT");
    return given == NULL ? 4096 : (size_t)strtoul(given, NULL, 10);
}

static bool batch_refused(void) {
    const char *given = getenv("ACL_EMULATOR_BATCH");
    return given != NULL && strcmp(given, "unsupported") == 0;
}

typedef struct {
    char *start;
    size_t size;
} span;

static int by_start(const void *left, const void *right) {
    const span *a = left, *b = right;
    return a->start < b->start ? -1 : a->start > b->start;
}

static bool overlap(void **dsts, const size_t *sizes, size_t count) {
    span *spans = malloc(count * sizeof *spans);
    if (spans == NULL) {
        return true;
    }
    for (size_t i = 0; i < count; i++) {
        spans[i] = (span){dsts[i], sizes[i]};
    }
    qsort(spans, count, sizeof *spans, by_start);
    bool found = false;
    for (size_t i = 1; i < count && !found; i++) {
        found = spans[i - 1].start + spans[i - 1].size > spans[i].start;
    }
    free(spans);
    return found;
}

static bool same_direction(const aclrtMemcpyBatchAttr *a, const aclrtMemcpyBatchAttr *b) {
    return a->dstLoc.type == b->dstLoc.type && a->srcLoc.type == b->srcLoc.type;
}

static aclError check_attributes(const aclrtMemcpyBatchAttr *attrs, const size_t *indexes, size_t num_attrs,
                                 size_t num_batches, aclrtMemcpyKind *kind) {
    static const uint8_t zeros[16];
    if (num_attrs == 0 || num_attrs > num_batches || indexes[0] != 0 || indexes[num_attrs - 1] >= num_batches) {
        return emu_error(ACL_ERROR_RT_PARAM_INVALID, "%zu attributes for %zu descriptors", num_attrs, num_batches);
    }
    for (size_t i = 0; i < num_attrs; i++) {
        if (i > 0 && indexes[i] <= indexes[i - 1]) {
            return emu_error(ACL_ERROR_RT_PARAM_INVALID, "attribute indexes do not rise");
        }
        if (memcmp(attrs[i].rsv, zeros, sizeof zeros) != 0) {
            return emu_error(ACL_ERROR_RT_PARAM_INVALID, "rsv must be zero");
        }
        if (attrs[i].dstLoc.type == attrs[i].srcLoc.type || !same_direction(&attrs[i], &attrs[0])) {
            return emu_error(ACL_ERROR_RT_PARAM_INVALID, "one direction a call, host to device or device to host");
        }
        const aclrtMemLocation *device =
            attrs[i].dstLoc.type == ACL_MEM_LOCATION_TYPE_DEVICE ? &attrs[i].dstLoc : &attrs[i].srcLoc;
        if ((int)device->id != emu_current_device()) {
            return emu_error(ACL_ERROR_RT_PARAM_INVALID, "device %u is not the current one", device->id);
        }
    }
    *kind = attrs[0].dstLoc.type == ACL_MEM_LOCATION_TYPE_DEVICE ? ACL_MEMCPY_HOST_TO_DEVICE : ACL_MEMCPY_DEVICE_TO_HOST;
    return ACL_SUCCESS;
}

static aclError check_descriptors(void **dsts, const size_t *dst_maxs, void **srcs, const size_t *sizes, size_t count,
                                  aclrtMemcpyKind kind, size_t *fail_index, bool *pinned) {
    *pinned = true;
    for (size_t i = 0; i < count; i++) {
        if (sizes[i] == 0 || sizes[i] > dst_maxs[i]) {
            return emu_error(ACL_ERROR_RT_PARAM_INVALID, "descriptor %zu: size %zu of %zu", i, sizes[i], dst_maxs[i]);
        }
        if (!matches(dsts[i], srcs[i], sizes[i], kind)) {
            *fail_index = i; /* named for attribute and direction checks only */
            return emu_error(ACL_ERROR_RT_PARAM_INVALID, "descriptor %zu is not as its attribute says", i);
        }
        *pinned = *pinned && emu_is_pinned(kind == ACL_MEMCPY_HOST_TO_DEVICE ? srcs[i] : dsts[i], sizes[i]);
    }
    if (overlap(dsts, sizes, count)) {
        return emu_error(ACL_ERROR_RT_PARAM_INVALID, "destinations overlap, and the order is not promised");
    }
    return ACL_SUCCESS;
}

aclError aclrtMemcpyBatchAsync(void **dsts, size_t *dst_maxs, void **srcs, size_t *sizes, size_t num_batches,
                               aclrtMemcpyBatchAttr *attrs, size_t *attrs_indexes, size_t num_attrs,
                               size_t *fail_index, aclrtStream stream_handle) {
    EMU_ENTER("aclrtMemcpyBatchAsync");
    aclError code = ACL_SUCCESS;
    if (batch_refused()) {
        code = emu_error(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "this device has no batch copies");
    } else if (dsts == NULL || dst_maxs == NULL || srcs == NULL || sizes == NULL || attrs == NULL ||
               attrs_indexes == NULL || fail_index == NULL || num_batches == 0) {
        code = emu_error(ACL_ERROR_RT_PARAM_INVALID, "a null argument, or no descriptors");
    } else if (num_batches > batch_limit()) {
        code = emu_error(ACL_ERROR_RT_OVER_LIMIT, "%zu descriptors, limit %zu", num_batches, batch_limit());
    }
    if (code != ACL_SUCCESS) {
        return emu_done("aclrtMemcpyBatchAsync", code, "num_batches=%zu", num_batches);
    }
    *fail_index = SIZE_MAX;
    aclrtMemcpyKind kind = ACL_MEMCPY_HOST_TO_HOST;
    bool pinned = false;
    pthread_mutex_lock(&emu_lock);
    emu_stream *stream = NULL;
    code = emu_find_stream(stream_handle, &stream);
    if (code == ACL_SUCCESS && (code = check_attributes(attrs, attrs_indexes, num_attrs, num_batches, &kind)) != 0) {
        *fail_index = 0;
    }
    if (code == ACL_SUCCESS) {
        code = check_descriptors(dsts, dst_maxs, srcs, sizes, num_batches, kind, fail_index, &pinned);
    }
    if (code == ACL_SUCCESS) {
        aclError broken = break_batch_code;
        size_t count = broken == ACL_SUCCESS ? num_batches : (size_t)break_batch_after;
        break_batch_code = ACL_SUCCESS;
        if (count > 0) {
            emu_copy copy = {.dsts = dsts, .srcs = srcs, .sizes = sizes, .count = count};
            copy.fingerprint = emu_fingerprint(dsts, srcs, sizes, count);
            code = submit(stream, &copy, pinned);
        }
        if (broken != ACL_SUCCESS) {
            code = emu_error(broken, "failed after %zu descriptors, which are in flight", count);
        }
    }
    pthread_mutex_unlock(&emu_lock);
    return emu_done("aclrtMemcpyBatchAsync", code, "num_batches=%zu kind=%d pinned=%d", num_batches, (int)kind, pinned);
}
#endif
