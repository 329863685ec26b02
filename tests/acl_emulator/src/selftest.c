/* The emulator against its own rules, from C, for a build with sanitizers. Prints nothing when all is well. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "control.h"

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "selftest: line %d: %s\n", __LINE__, #condition);                                          \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

enum { BLOCK = 4096, BLOCKS = 64 };

static char *device, *host, *pageable;

static void fill_randomly(char *memory) {
    for (int i = 0; i < BLOCK * BLOCKS; i++) {
        memory[i] = (char)rand();
    }
}

static aclrtMemcpyBatchAttr to_host(void) {
    return (aclrtMemcpyBatchAttr){.dstLoc = {0, ACL_MEM_LOCATION_TYPE_HOST}, .srcLoc = {0, ACL_MEM_LOCATION_TYPE_DEVICE}};
}

static void copies_single_and_batched(void) {
    aclrtStream stream;
    CHECK(aclrtCreateStream(&stream) == 0);
    fill_randomly(device);
    for (int i = 0; i < BLOCKS; i++) {
        CHECK(aclrtMemcpyAsync(host + i * BLOCK, BLOCK, device + i * BLOCK, BLOCK, ACL_MEMCPY_DEVICE_TO_HOST, stream) == 0);
    }
    CHECK(aclrtSynchronizeStream(stream) == 0);
    CHECK(memcmp(host, device, BLOCK * BLOCKS) == 0);

    memset(host, 0, BLOCK * BLOCKS);
    void *dsts[BLOCKS], *srcs[BLOCKS];
    size_t sizes[BLOCKS], index = 0, failed = 7;
    for (int i = 0; i < BLOCKS; i++) {
        dsts[i] = host + (BLOCKS - 1 - i) * BLOCK;
        srcs[i] = device + i * BLOCK;
        sizes[i] = BLOCK;
    }
    aclrtMemcpyBatchAttr attr = to_host();
    CHECK(aclrtMemcpyBatchAsync(dsts, sizes, srcs, sizes, BLOCKS, &attr, &index, 1, &failed, stream) == 0);
    CHECK(failed == SIZE_MAX);
    CHECK(aclrtSynchronizeStream(stream) == 0);
    for (int i = 0; i < BLOCKS; i++) {
        CHECK(memcmp(dsts[i], srcs[i], BLOCK) == 0);
    }

    sizes[3] = 0;
    CHECK(aclrtMemcpyBatchAsync(dsts, sizes, srcs, sizes, BLOCKS, &attr, &index, 1, &failed, stream) == 107000);
    sizes[3] = BLOCK;
    attr.rsv[2] = 1;
    CHECK(aclrtMemcpyBatchAsync(dsts, sizes, srcs, sizes, BLOCKS, &attr, &index, 1, &failed, stream) == 107000);
    CHECK(failed == 0);
    attr = to_host();
    srcs[5] = pageable;
    CHECK(aclrtMemcpyBatchAsync(dsts, sizes, srcs, sizes, BLOCKS, &attr, &index, 1, &failed, stream) == 107000);
    CHECK(failed == 5);
    CHECK(aclGetRecentErrMsg() != NULL);
    CHECK(aclGetRecentErrMsg() == NULL);
    dsts[4] = dsts[5];
    srcs[5] = device;
    CHECK(aclrtMemcpyBatchAsync(dsts, sizes, srcs, sizes, BLOCKS, &attr, &index, 1, &failed, stream) == 107000);
    size_t indexes[2] = {0, BLOCKS};
    aclrtMemcpyBatchAttr attrs[2] = {to_host(), to_host()};
    CHECK(aclrtMemcpyBatchAsync(dsts, sizes, srcs, sizes, BLOCKS, attrs, indexes, 2, &failed, stream) == 107000);
    CHECK(aclrtDestroyStream(stream) == 0);
}

static void a_wait_holds_a_copy_back(void) {
    aclrtStream compute, copies;
    aclrtEvent written, start, end;
    aclrtEventRecordedStatus status;
    CHECK(aclrtCreateStream(&compute) == 0 && aclrtCreateStream(&copies) == 0);
    CHECK(aclrtCreateEventExWithFlag(&written, ACL_EVENT_SYNC) == 0);
    CHECK(aclrtCreateEventExWithFlag(&start, ACL_EVENT_TIME_LINE) == 0);
    CHECK(aclrtCreateEventExWithFlag(&end, ACL_EVENT_TIME_LINE) == 0);
    CHECK(aclrtQueryEventStatus(end, &status) == 0 && status == ACL_EVENT_RECORDED_STATUS_COMPLETE);
    CHECK(aclrtStreamWaitEvent(copies, end) == 107000); /* made without ACL_EVENT_SYNC */
    memset(device, 1, BLOCK);
    CHECK(emu_stream_gate(compute, 1) == 0);
    CHECK(emu_stream_fill(compute, device, 9, BLOCK) == 0);
    CHECK(aclrtRecordEvent(written, compute) == 0);
    CHECK(aclrtRecordEvent(start, copies) == 0);
    CHECK(aclrtStreamWaitEvent(copies, written) == 0);
    CHECK(aclrtMemcpyAsync(host, BLOCK, device, BLOCK, ACL_MEMCPY_DEVICE_TO_HOST, copies) == 0);
    CHECK(aclrtRecordEvent(end, copies) == 0);
    CHECK(aclrtRecordEvent(written, copies) == 0); /* the wait above keeps what it saw */
    CHECK(aclrtSynchronizeStreamWithTimeout(copies, 20) == ACL_ERROR_RT_STREAM_SYNC_TIMEOUT);
    CHECK(aclrtSynchronizeEventWithTimeout(end, 0) == ACL_ERROR_RT_EVENT_SYNC_TIMEOUT);
    emu_open_gate(1);
    CHECK(aclrtSynchronizeEvent(end) == 0);
    CHECK(host[0] == 9 && host[BLOCK - 1] == 9);
    float milliseconds = -1;
    CHECK(aclrtEventElapsedTime(&milliseconds, start, end) == 0 && milliseconds >= 0);
    CHECK(aclrtSynchronizeStream(copies) == 0);
    CHECK(aclrtDestroyEvent(written) == 0 && aclrtDestroyEvent(start) == 0 && aclrtDestroyEvent(end) == 0);
    CHECK(aclrtDestroyStream(compute) == 0 && aclrtDestroyStream(copies) == 0);
}

static void pageable_memory_makes_the_call_wait(void) {
    aclrtStream stream;
    CHECK(aclrtCreateStream(&stream) == 0);
    fill_randomly(device);
    emu_delay_copies(2000);
    CHECK(aclrtMemcpyAsync(host, BLOCK, device, BLOCK, ACL_MEMCPY_DEVICE_TO_HOST, stream) == 0);
    CHECK(aclrtMemcpyAsync(pageable, BLOCK, device + BLOCK, BLOCK, ACL_MEMCPY_DEVICE_TO_HOST, stream) == 0);
    CHECK(memcmp(pageable, device + BLOCK, BLOCK) == 0 && memcmp(host, device, BLOCK) == 0);
    emu_delay_copies(0);
    CHECK(aclrtDestroyStream(stream) == 0);
}

static void failures(void) {
    aclrtStream stream;
    aclrtEvent event;
    aclrtEventRecordedStatus status;
    CHECK(aclrtCreateStream(&stream) == 0);
    CHECK(aclrtCreateEventWithFlag(&event, ACL_EVENT_SYNC | ACL_EVENT_TIME_LINE) == 0);
    CHECK(aclrtQueryEventStatus(event, &status) == 0 && status == ACL_EVENT_RECORDED_STATUS_NOT_READY);
    emu_fail("aclrtMemcpyAsync", 2, 207001, 1);
    CHECK(aclrtMemcpyAsync(host, BLOCK, device, BLOCK, ACL_MEMCPY_DEVICE_TO_HOST, stream) == 0);
    CHECK(aclrtMemcpyAsync(host, BLOCK, device, BLOCK, ACL_MEMCPY_DEVICE_TO_HOST, stream) == 207001);
    CHECK(aclrtMemcpyAsync(host, BLOCK, device, BLOCK, ACL_MEMCPY_HOST_TO_DEVICE, stream) == 107000);
    CHECK(aclrtMemcpyAsync(host, BLOCK - 1, device, BLOCK, ACL_MEMCPY_DEVICE_TO_HOST, stream) == 107000);
    CHECK(aclrtSynchronizeStream(stream) == 0);
    emu_fail_copy(1, 507054);
    CHECK(aclrtMemcpyAsync(host, BLOCK, device, BLOCK, ACL_MEMCPY_DEVICE_TO_HOST, stream) == 0);
    CHECK(aclrtRecordEvent(event, stream) == 0);
    CHECK(aclrtSynchronizeStream(stream) == 507054);
    CHECK(aclrtQueryEventStatus(event, &status) == 0 && status == ACL_EVENT_RECORDED_STATUS_NOT_READY);
    CHECK(aclrtRecordEvent(event, stream) == 107000); /* not reset */
    CHECK(aclrtDestroyEvent(event) == 0);
    CHECK(aclrtSetDevice(1) == 0);
    CHECK(aclrtSynchronizeStream(stream) == 107003);
    CHECK(aclrtSetDevice(0) == 0);
    CHECK(aclrtDestroyStream(stream) == 0);

    CHECK(aclrtCreateStream(&stream) == 0); /* stuck, then aborted, then destroyed by force */
    CHECK(emu_stream_gate(stream, 2) == 0);
    CHECK(aclrtSynchronizeStreamWithTimeout(stream, 5) == 507046);
    CHECK(aclrtStreamAbort(stream) == 0);
    CHECK(aclrtSynchronizeStreamWithTimeout(stream, 1000) == 0);
    CHECK(emu_stream_gate(stream, 2) == 0);
    CHECK(aclrtDestroyStreamForce(stream) == 0);
    CHECK(aclrtSynchronizeStream(stream) == 107000);
    CHECK(emu_calls("aclrtMemcpyAsync") > 0 && emu_log_size() > 0);
}

int main(void) {
    void *device_memory, *host_memory;
    aclrtStream stream;
    CHECK(aclrtCreateStream(&stream) == 107002);
    CHECK(aclrtSetDevice(2) == 107000);
    CHECK(aclrtSetDevice(0) == 0);
    CHECK(aclrtMalloc(&device_memory, BLOCK * BLOCKS, 0) == 0);
    device = device_memory;
    host_memory = aligned_alloc(BLOCK, BLOCK * BLOCKS);
    host = host_memory;
    pageable = malloc(BLOCK * BLOCKS);
    CHECK(aclrtHostRegisterV2(host + 8, BLOCK, ACL_HOST_REG_PINNED) == 107000);
    CHECK(aclrtHostRegisterV2(host, BLOCK * BLOCKS, ACL_HOST_REG_PINNED) == 0);
    CHECK(aclrtHostRegisterV2(host, BLOCK * BLOCKS, ACL_HOST_REG_PINNED) == 507910);
    copies_single_and_batched();
    a_wait_holds_a_copy_back();
    pageable_memory_makes_the_call_wait();
    failures();
    char version[ACL_PKG_VERSION_MAX_SIZE], package[] = "runtime";
    CHECK(aclsysGetVersionStr(package, version) == 0 && strcmp(version, "9.1.0") == 0);
    CHECK(aclrtHostUnregister(host) == 0);
    CHECK(aclrtHostUnregister(host) == 507911);
    CHECK(aclrtFree(device_memory) == 0);
    free(host);
    free(pageable);
    emu_live_counts counts;
    emu_live(&counts);
    CHECK(counts.streams == 0 && counts.events == 0 && counts.host_registrations == 0);
    CHECK(counts.device_allocations == 0 && counts.unfinished_tasks == 0);
    emu_reset();
    return 0;
}
