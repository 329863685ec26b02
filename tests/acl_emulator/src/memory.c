/* Who a pointer belongs to: device ranges, registered (pinned) host ranges, and pageable memory, which is the rest. */
#include <stdlib.h>
#include <string.h>

#include "emulator.h"

#define MAX_RANGES 1024
#define PAGE 4096u

typedef struct {
    char *start;
    size_t size;
    bool owned; /* allocated here */
} range;

typedef struct {
    range items[MAX_RANGES];
    int count;
} ranges;

static ranges device_ranges, pinned_ranges;

static int find(const ranges *in, const void *pointer) {
    for (int i = 0; i < in->count; i++) {
        if (in->items[i].start == (const char *)pointer) {
            return i;
        }
    }
    return -1;
}

static bool holds(const ranges *in, const void *pointer, size_t size) {
    for (int i = 0; i < in->count; i++) {
        const range *it = &in->items[i];
        const char *start = pointer;
        if (start >= it->start && start + size <= it->start + it->size) {
            return true;
        }
    }
    return false;
}

static bool touches(const ranges *in, const void *pointer, size_t size) {
    for (int i = 0; i < in->count; i++) {
        const range *it = &in->items[i];
        const char *start = pointer;
        if (start < it->start + it->size && it->start < start + size) {
            return true;
        }
    }
    return false;
}

static bool add(ranges *to, void *pointer, size_t size, bool owned) {
    if (to->count == MAX_RANGES) {
        return false;
    }
    to->items[to->count++] = (range){pointer, size, owned};
    return true;
}

static void drop(ranges *from, int at) { from->items[at] = from->items[--from->count]; }

bool emu_is_device(const void *pointer, size_t size) { return holds(&device_ranges, pointer, size); }
bool emu_touches_device(const void *pointer, size_t size) { return touches(&device_ranges, pointer, size); }
bool emu_is_pinned(const void *pointer, size_t size) { return holds(&pinned_ranges, pointer, size); }

int emu_device_range(void *pointer, size_t size) {
    pthread_mutex_lock(&emu_lock);
    bool added = !touches(&device_ranges, pointer, size) && add(&device_ranges, pointer, size, false);
    pthread_mutex_unlock(&emu_lock);
    return added;
}

int emu_forget_device_range(void *pointer) {
    pthread_mutex_lock(&emu_lock);
    int at = find(&device_ranges, pointer);
    if (at >= 0 && !device_ranges.items[at].owned) {
        drop(&device_ranges, at);
    }
    pthread_mutex_unlock(&emu_lock);
    return at >= 0;
}

void emu_reset_memory(void);
void emu_reset_memory(void) {
    pthread_mutex_lock(&emu_lock);
    for (int i = device_ranges.count - 1; i >= 0; i--) {
        if (!device_ranges.items[i].owned) {
            drop(&device_ranges, i);
        }
    }
    pthread_mutex_unlock(&emu_lock);
}

static aclError allocate(ranges *in, void **pointer, size_t size) {
    if (pointer == NULL || size == 0) {
        return emu_error(ACL_ERROR_RT_PARAM_INVALID, "no pointer, or no bytes");
    }
    void *memory = aligned_alloc(PAGE, (size + PAGE - 1) / PAGE * PAGE);
    if (memory == NULL || !add(in, memory, size, true)) {
        free(memory);
        return emu_error(ACL_ERROR_RT_MEMORY_ALLOCATION, "%zu bytes", size);
    }
    memset(memory, 0xa5, size); /* uninitialised, as documented */
    *pointer = memory;
    return ACL_SUCCESS;
}

static aclError release(ranges *in, void *pointer) {
    int at = find(in, pointer);
    if (at < 0 || !in->items[at].owned) {
        return emu_error(ACL_ERROR_RT_PARAM_INVALID, "%p was not allocated here", pointer);
    }
    drop(in, at);
    free(pointer);
    return ACL_SUCCESS;
}

aclError aclrtMalloc(void **device_pointer, size_t size, aclrtMemMallocPolicy policy) {
    EMU_ENTER("aclrtMalloc");
    pthread_mutex_lock(&emu_lock);
    aclError code = allocate(&device_ranges, device_pointer, size);
    emu_counts.device_allocations += code == ACL_SUCCESS;
    pthread_mutex_unlock(&emu_lock);
    return emu_done("aclrtMalloc", code, "size=%zu policy=%d", size, policy);
}

aclError aclrtFree(void *device_pointer) {
    EMU_ENTER("aclrtFree");
    pthread_mutex_lock(&emu_lock);
    aclError code = release(&device_ranges, device_pointer);
    emu_counts.device_allocations -= code == ACL_SUCCESS;
    pthread_mutex_unlock(&emu_lock);
    return emu_done("aclrtFree", code, "-");
}

aclError aclrtMallocHost(void **host_pointer, size_t size) {
    EMU_ENTER("aclrtMallocHost");
    pthread_mutex_lock(&emu_lock);
    aclError code = allocate(&pinned_ranges, host_pointer, size);
    emu_counts.host_registrations += code == ACL_SUCCESS;
    pthread_mutex_unlock(&emu_lock);
    return emu_done("aclrtMallocHost", code, "size=%zu", size);
}

aclError aclrtFreeHost(void *host_pointer) {
    EMU_ENTER("aclrtFreeHost");
    pthread_mutex_lock(&emu_lock);
    aclError code = release(&pinned_ranges, host_pointer);
    emu_counts.host_registrations -= code == ACL_SUCCESS;
    pthread_mutex_unlock(&emu_lock);
    return emu_done("aclrtFreeHost", code, "-");
}

#ifndef WITHOUT_HOST_REGISTER_V2
aclError aclrtHostRegisterV2(void *pointer, uint64_t size, uint32_t flag) {
    EMU_ENTER("aclrtHostRegisterV2");
    pthread_mutex_lock(&emu_lock);
    aclError code = ACL_SUCCESS;
    if (emu_current_device() < 0) {
        code = emu_error(ACL_ERROR_RT_CONTEXT_NULL, "no device was set");
    } else if (pointer == NULL || size == 0 || (uintptr_t)pointer % PAGE != 0 ||
               (flag & ~(ACL_HOST_REG_PINNED | ACL_HOST_REG_MAPPED)) != 0 || flag == 0) {
        code = emu_error(ACL_ERROR_RT_PARAM_INVALID, "pointer %p, size %lu, flag 0x%x", pointer, (unsigned long)size, flag);
    } else if (touches(&pinned_ranges, pointer, size)) {
        code = emu_error(ACL_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "%p is registered", pointer);
    } else if (touches(&device_ranges, pointer, size)) {
        code = emu_error(ACL_ERROR_RT_PARAM_INVALID, "%p is device memory", pointer);
    } else if (!add(&pinned_ranges, pointer, size, false)) {
        code = emu_error(ACL_ERROR_RT_MEMORY_ALLOCATION, "too many registrations");
    }
    emu_counts.host_registrations += code == ACL_SUCCESS;
    pthread_mutex_unlock(&emu_lock);
    return emu_done("aclrtHostRegisterV2", code, "size=%lu flag=0x%x", (unsigned long)size, flag);
}
#endif

aclError aclrtHostUnregister(void *pointer) {
    EMU_ENTER("aclrtHostUnregister");
    pthread_mutex_lock(&emu_lock);
    int at = find(&pinned_ranges, pointer);
    aclError code = ACL_SUCCESS;
    if (at < 0 || pinned_ranges.items[at].owned) {
        code = emu_error(ACL_ERROR_HOST_MEMORY_NOT_REGISTERED, "%p is not registered", pointer);
    } else {
        drop(&pinned_ranges, at);
        emu_counts.host_registrations--;
    }
    pthread_mutex_unlock(&emu_lock);
    return emu_done("aclrtHostUnregister", code, "-");
}
