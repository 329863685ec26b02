/* Streams: a thread and a queue each. A task that fails puts its stream in error; what is queued behind it is dropped,
 * so events recorded there stay "not ready", as documented for events whose tasks failed. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "event.h"

#define MAX_GATES 64
#define NUM_DEVICES 2

typedef enum { TASK_COPY, TASK_RECORD, TASK_WAIT, TASK_GATE, TASK_FILL, TASK_COPY_OUT } task_kind;

typedef struct task {
    struct task *next;
    task_kind kind;
    emu_copy copy;
    emu_record *record;
    int number; /* gate, or value to fill with */
} task;

struct emu_stream {
    struct emu_stream *next;
    pthread_t thread;
    task *first, *last;
    int device;
    bool busy, closing, aborting, captured;
    aclError error;
};

pthread_mutex_t emu_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t emu_changed;
emu_live_counts emu_counts;
static emu_stream *streams, *default_streams[NUM_DEVICES];
static bool gates[MAX_GATES];

__attribute__((constructor)) static void use_monotonic_clock(void) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&emu_changed, &attributes);
    pthread_condattr_destroy(&attributes);
}

static void free_task(task *it) {
    if (it->record != NULL) {
        emu_release_record(it->record);
    }
    free(it);
    emu_counts.unfinished_tasks--;
}

static void drop_queue(emu_stream *stream) {
    while (stream->first != NULL) {
        task *it = stream->first;
        stream->first = it->next;
        free_task(it);
    }
    stream->last = NULL;
}

static void run(emu_stream *stream, task *it) {
    aclError failed = ACL_SUCCESS;
    switch (it->kind) {
    case TASK_COPY:
        pthread_mutex_unlock(&emu_lock);
        emu_run_copy(&it->copy, &failed);
        pthread_mutex_lock(&emu_lock);
        break;
    case TASK_FILL:
        pthread_mutex_unlock(&emu_lock);
        memset(it->copy.dst, it->number, it->copy.size);
        pthread_mutex_lock(&emu_lock);
        break;
    case TASK_COPY_OUT:
        pthread_mutex_unlock(&emu_lock);
        memcpy(it->copy.dst, it->copy.src, it->copy.size);
        pthread_mutex_lock(&emu_lock);
        break;
    case TASK_RECORD:
        emu_complete_record(it->record);
        break;
    case TASK_WAIT:
        while (!emu_record_done(it->record) && !stream->aborting) {
            pthread_cond_wait(&emu_changed, &emu_lock);
        }
        break;
    case TASK_GATE:
        while (!gates[it->number] && !stream->aborting) {
            pthread_cond_wait(&emu_changed, &emu_lock);
        }
        break;
    }
    if (failed != ACL_SUCCESS) {
        stream->error = failed;
    }
}

static void *stream_thread(void *argument) {
    emu_stream *stream = argument;
    pthread_mutex_lock(&emu_lock);
    for (;;) {
        while (stream->first == NULL && !stream->closing) {
            pthread_cond_wait(&emu_changed, &emu_lock);
        }
        task *it = stream->first;
        if (it == NULL) {
            break;
        }
        stream->first = it->next;
        if (stream->first == NULL) {
            stream->last = NULL;
        }
        stream->busy = true;
        if (stream->error == ACL_SUCCESS) {
            run(stream, it);
        }
        free_task(it);
        stream->busy = false;
        pthread_cond_broadcast(&emu_changed);
    }
    pthread_mutex_unlock(&emu_lock);
    return NULL;
}

static emu_stream *open_stream(int device) {
    emu_stream *stream = calloc(1, sizeof *stream);
    if (stream != NULL) {
        stream->device = device;
        if (pthread_create(&stream->thread, NULL, stream_thread, stream) != 0) {
            free(stream);
            return NULL;
        }
    }
    return stream;
}

/* Ends the thread; the lock is held by the caller and given up meanwhile. */
static void close_stream(emu_stream *stream, bool drop) {
    if (drop) {
        drop_queue(stream);
        stream->aborting = true;
    }
    stream->closing = true;
    pthread_cond_broadcast(&emu_changed);
    pthread_mutex_unlock(&emu_lock);
    pthread_join(stream->thread, NULL);
    pthread_mutex_lock(&emu_lock);
    free(stream);
}

aclError emu_find_stream(aclrtStream handle, emu_stream **found) {
    int device = emu_current_device();
    if (device < 0) {
        return emu_error(ACL_ERROR_RT_CONTEXT_NULL, "no device was set on this thread");
    }
    if (handle == NULL) {
        if (default_streams[device] == NULL) {
            default_streams[device] = open_stream(device);
        }
        *found = default_streams[device];
        return *found == NULL ? emu_error(ACL_ERROR_RT_MEMORY_ALLOCATION, "no default stream") : ACL_SUCCESS;
    }
    for (emu_stream *it = streams; it != NULL; it = it->next) {
        if (it == handle) {
            if (it->device != device) {
                return emu_error(ACL_ERROR_RT_STREAM_CONTEXT, "stream of device %d used on device %d", it->device, device);
            }
            *found = it;
            return ACL_SUCCESS;
        }
    }
    return emu_error(ACL_ERROR_RT_PARAM_INVALID, "%p is no stream", handle);
}

static aclError enqueue(emu_stream *stream, task given) {
    task *it = malloc(sizeof *it);
    if (it == NULL) {
        return emu_error(ACL_ERROR_RT_MEMORY_ALLOCATION, "no task");
    }
    *it = given;
    it->next = NULL;
    if (stream->last == NULL) {
        stream->first = it;
    } else {
        stream->last->next = it;
    }
    stream->last = it;
    emu_counts.unfinished_tasks++;
    pthread_cond_broadcast(&emu_changed);
    return ACL_SUCCESS;
}

void emu_enqueue_copy(emu_stream *stream, const emu_copy *copy) { enqueue(stream, (task){.kind = TASK_COPY, .copy = *copy}); }
void emu_enqueue_record(emu_stream *stream, emu_record *record) {
    enqueue(stream, (task){.kind = TASK_RECORD, .record = record});
}
void emu_enqueue_wait(emu_stream *stream, emu_record *record) {
    enqueue(stream, (task){.kind = TASK_WAIT, .record = record});
}

bool emu_wait_changed(const struct timespec *deadline) {
    if (deadline == NULL) {
        return pthread_cond_wait(&emu_changed, &emu_lock) == 0;
    }
    return pthread_cond_timedwait(&emu_changed, &emu_lock, deadline) != ETIMEDOUT;
}

struct timespec emu_deadline(int32_t timeout_ms) {
    struct timespec deadline;
    clock_gettime(CLOCK_MONOTONIC, &deadline);
    deadline.tv_sec += timeout_ms / 1000;
    deadline.tv_nsec += (long)(timeout_ms % 1000) * 1000000L;
    if (deadline.tv_nsec >= 1000000000L) {
        deadline.tv_sec++;
        deadline.tv_nsec -= 1000000000L;
    }
    return deadline;
}

aclError emu_drain(emu_stream *stream, int32_t timeout_ms) {
    struct timespec deadline = emu_deadline(timeout_ms);
    while (stream->first != NULL || stream->busy) {
        if (!emu_wait_changed(timeout_ms < 0 ? NULL : &deadline) && (stream->first != NULL || stream->busy)) {
            return emu_error(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT, "the stream is not done after %d ms", timeout_ms);
        }
    }
    return stream->error == ACL_SUCCESS ? ACL_SUCCESS : emu_error(stream->error, "a task of the stream failed");
}

aclError aclrtCreateStream(aclrtStream *handle) {
    EMU_ENTER("aclrtCreateStream");
    pthread_mutex_lock(&emu_lock);
    aclError code = ACL_SUCCESS;
    if (handle == NULL) {
        code = emu_error(ACL_ERROR_RT_PARAM_INVALID, "no place for the stream");
    } else if (emu_current_device() < 0) {
        code = emu_error(ACL_ERROR_RT_CONTEXT_NULL, "no device was set on this thread");
    } else {
        emu_stream *stream = open_stream(emu_current_device());
        if (stream == NULL) {
            code = emu_error(ACL_ERROR_RT_MEMORY_ALLOCATION, "no stream");
        } else {
            stream->next = streams;
            streams = stream;
            *handle = stream;
            emu_counts.streams++;
        }
    }
    pthread_mutex_unlock(&emu_lock);
    return emu_done("aclrtCreateStream", code, "-");
}

static aclError destroy(aclrtStream handle, bool drop) {
    pthread_mutex_lock(&emu_lock);
    emu_stream *stream = NULL;
    aclError code = handle == NULL ? emu_error(ACL_ERROR_RT_PARAM_INVALID, "the default stream stays")
                                   : emu_find_stream(handle, &stream);
    if (code == ACL_SUCCESS) {
        emu_stream **at = &streams;
        while (*at != stream) {
            at = &(*at)->next;
        }
        *at = stream->next;
        close_stream(stream, drop);
        emu_counts.streams--;
    }
    pthread_mutex_unlock(&emu_lock);
    return code;
}

aclError aclrtDestroyStream(aclrtStream handle) {
    EMU_ENTER("aclrtDestroyStream");
    return emu_done("aclrtDestroyStream", destroy(handle, false), "-");
}

aclError aclrtDestroyStreamForce(aclrtStream handle) {
    EMU_ENTER("aclrtDestroyStreamForce");
    return emu_done("aclrtDestroyStreamForce", destroy(handle, true), "-");
}

#ifndef WITHOUT_STREAM_ABORT
aclError aclrtStreamAbort(aclrtStream handle) {
    EMU_ENTER("aclrtStreamAbort");
    pthread_mutex_lock(&emu_lock);
    emu_stream *stream = NULL;
    aclError code = emu_find_stream(handle, &stream);
    if (code == ACL_SUCCESS) {
        drop_queue(stream);
        stream->aborting = true;
        pthread_cond_broadcast(&emu_changed);
        while (stream->busy) {
            pthread_cond_wait(&emu_changed, &emu_lock);
        }
        stream->aborting = false;
    }
    pthread_mutex_unlock(&emu_lock);
    return emu_done("aclrtStreamAbort", code, "-");
}
#endif

static aclError synchronize(aclrtStream handle, int32_t timeout_ms) {
    pthread_mutex_lock(&emu_lock);
    emu_stream *stream = NULL;
    aclError code = emu_find_stream(handle, &stream);
    if (code == ACL_SUCCESS) {
        code = emu_drain(stream, timeout_ms);
    }
    pthread_mutex_unlock(&emu_lock);
    return code;
}

aclError aclrtSynchronizeStream(aclrtStream handle) {
    EMU_ENTER("aclrtSynchronizeStream");
    return emu_done("aclrtSynchronizeStream", synchronize(handle, -1), "-");
}

aclError aclrtSynchronizeStreamWithTimeout(aclrtStream handle, int32_t timeout_ms) {
    EMU_ENTER("aclrtSynchronizeStreamWithTimeout");
    return emu_done("aclrtSynchronizeStreamWithTimeout", synchronize(handle, timeout_ms), "timeout=%d", timeout_ms);
}

static int enqueue_for_test(aclrtStream handle, task given) {
    pthread_mutex_lock(&emu_lock);
    emu_stream *stream = NULL;
    aclError code = emu_find_stream(handle, &stream);
    if (code == ACL_SUCCESS) {
        code = enqueue(stream, given);
    }
    pthread_mutex_unlock(&emu_lock);
    return code;
}

int emu_stream_gate(aclrtStream handle, int gate) {
    if (gate < 0 || gate >= MAX_GATES) {
        return ACL_ERROR_INVALID_PARAM;
    }
    return enqueue_for_test(handle, (task){.kind = TASK_GATE, .number = gate});
}

void emu_open_gate(int gate) {
    pthread_mutex_lock(&emu_lock);
    gates[gate] = true;
    pthread_cond_broadcast(&emu_changed);
    pthread_mutex_unlock(&emu_lock);
}

int emu_stream_fill(aclrtStream handle, void *pointer, int value, size_t size) {
    return enqueue_for_test(handle, (task){.kind = TASK_FILL, .copy = {.dst = pointer, .size = size}, .number = value});
}

int emu_stream_copy_out(aclrtStream handle, void *host, const void *device, size_t size) {
    emu_copy copy = {.dst = host, .src = (void *)device, .size = size};
    return enqueue_for_test(handle, (task){.kind = TASK_COPY_OUT, .copy = copy});
}

int emu_wait_tasks(int64_t at_most, int32_t timeout_ms) {
    struct timespec deadline = emu_deadline(timeout_ms);
    pthread_mutex_lock(&emu_lock);
    bool in_time = true;
    while (emu_counts.unfinished_tasks > at_most && in_time) {
        in_time = emu_wait_changed(&deadline);
    }
    int reached = emu_counts.unfinished_tasks <= at_most;
    pthread_mutex_unlock(&emu_lock);
    return reached;
}

void emu_live(emu_live_counts *counts) {
    pthread_mutex_lock(&emu_lock);
    *counts = emu_counts;
    pthread_mutex_unlock(&emu_lock);
}

void emu_reset_calls(void);
void emu_reset_memory(void);

void emu_reset(void) {
    pthread_mutex_lock(&emu_lock);
    for (int device = 0; device < NUM_DEVICES; device++) {
        if (default_streams[device] != NULL) {
            emu_stream *stream = default_streams[device];
            default_streams[device] = NULL;
            close_stream(stream, true);
        }
    }
    memset(gates, 0, sizeof gates);
    pthread_mutex_unlock(&emu_lock);
    emu_reset_memory();
    emu_reset_calls();
}

int emu_capture(aclrtStream handle, int captured) {
    pthread_mutex_lock(&emu_lock);
    emu_stream *stream = NULL;
    aclError code = emu_find_stream(handle, &stream);
    if (code == ACL_SUCCESS) {
        stream->captured = captured != 0;
    }
    pthread_mutex_unlock(&emu_lock);
    return code;
}

aclError aclmdlRICaptureGetInfo(aclrtStream handle, aclmdlRICaptureStatus *status, aclmdlRI *graph) {
    EMU_ENTER("aclmdlRICaptureGetInfo");
    pthread_mutex_lock(&emu_lock);
    emu_stream *stream = NULL;
    aclError code = emu_find_stream(handle, &stream);
    if (code == ACL_SUCCESS && (status == NULL || graph == NULL)) {
        code = emu_error(ACL_ERROR_RT_PARAM_INVALID, "no place for the answer");
    }
    if (code == ACL_SUCCESS) {
        *status = stream->captured ? ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE : ACL_MODEL_RI_CAPTURE_STATUS_NONE;
        *graph = stream->captured ? (aclmdlRI)stream : NULL;
    }
    pthread_mutex_unlock(&emu_lock);
    return emu_done("aclmdlRICaptureGetInfo", code, "stream=%p", handle);
}
