/* The part of the ACL runtime's C interface that Spillway calls: names, types and values as its documentation gives
 * them (CANN 8.5 to 9.1). Written from the documentation, so that the Python binding is checked against a second
 * reading of it. */
#ifndef ACL_EMULATOR_ABI_H
#define ACL_EMULATOR_ABI_H

#include <stddef.h>
#include <stdint.h>

typedef int aclError;
typedef void *aclrtStream;
typedef void *aclrtEvent;

enum {
    ACL_SUCCESS = 0,
    ACL_ERROR_INVALID_PARAM = 100000,
    ACL_ERROR_RT_PARAM_INVALID = 107000,
    ACL_ERROR_RT_CONTEXT_NULL = 107002,
    ACL_ERROR_RT_STREAM_CONTEXT = 107003,
    ACL_ERROR_RT_MEM_ALIGN = 107008,
    ACL_ERROR_RT_FEATURE_NOT_SUPPORT = 207000,
    ACL_ERROR_RT_MEMORY_ALLOCATION = 207001,
    ACL_ERROR_RT_OVER_LIMIT = 207012,
    ACL_ERROR_RT_STREAM_SYNC_TIMEOUT = 507046,
    ACL_ERROR_RT_EVENT_SYNC_TIMEOUT = 507047,
    ACL_ERROR_RT_DRV_INTERNAL_ERROR = 507899,
    ACL_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 507910,
    ACL_ERROR_HOST_MEMORY_NOT_REGISTERED = 507911,
};

#define ACL_EVENT_SYNC 0x00000001u
#define ACL_EVENT_TIME_LINE 0x00000008u
#define ACL_HOST_REG_MAPPED 0x2u
#define ACL_HOST_REG_PINNED 0x10000000u
#define ACL_PKG_VERSION_MAX_SIZE 128
#define ACL_PKG_VERSION_PARTS_MAX_SIZE 64

typedef enum { ACL_MEMCPY_HOST_TO_HOST, ACL_MEMCPY_HOST_TO_DEVICE, ACL_MEMCPY_DEVICE_TO_HOST } aclrtMemcpyKind;
typedef enum { ACL_EVENT_RECORDED_STATUS_NOT_READY, ACL_EVENT_RECORDED_STATUS_COMPLETE } aclrtEventRecordedStatus;
typedef enum { ACL_MEM_LOCATION_TYPE_HOST, ACL_MEM_LOCATION_TYPE_DEVICE } aclrtMemLocationType;
typedef enum { ACL_PKG_NAME_CANN, ACL_PKG_NAME_RUNTIME } aclCANNPackageName;
typedef int aclrtMemMallocPolicy;
typedef void *aclmdlRI;
typedef enum {
    ACL_MODEL_RI_CAPTURE_STATUS_NONE,
    ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE,
    ACL_MODEL_RI_CAPTURE_STATUS_INVALIDATED
} aclmdlRICaptureStatus;

typedef struct {
    uint32_t id;
    aclrtMemLocationType type;
} aclrtMemLocation;

typedef struct {
    aclrtMemLocation dstLoc;
    aclrtMemLocation srcLoc;
    uint8_t rsv[16];
} aclrtMemcpyBatchAttr;

typedef struct {
    char version[ACL_PKG_VERSION_MAX_SIZE];
    char majorVersion[ACL_PKG_VERSION_PARTS_MAX_SIZE];
    char minorVersion[ACL_PKG_VERSION_PARTS_MAX_SIZE];
    char releaseVersion[ACL_PKG_VERSION_PARTS_MAX_SIZE];
    char patchVersion[ACL_PKG_VERSION_PARTS_MAX_SIZE];
    char reserved[ACL_PKG_VERSION_MAX_SIZE];
} aclCANNPackageVersion;

aclError aclrtSetDevice(int32_t device);
aclError aclrtGetDevice(int32_t *device);
const char *aclGetRecentErrMsg(void);
aclError aclrtGetVersion(int32_t *major, int32_t *minor, int32_t *patch);
aclError aclsysGetVersionStr(char *package, char *version);
aclError aclsysGetCANNVersion(aclCANNPackageName name, aclCANNPackageVersion *version);

aclError aclrtMalloc(void **device_pointer, size_t size, aclrtMemMallocPolicy policy);
aclError aclrtFree(void *device_pointer);
aclError aclrtMallocHost(void **host_pointer, size_t size);
aclError aclrtFreeHost(void *host_pointer);
aclError aclrtHostRegisterV2(void *pointer, uint64_t size, uint32_t flag);
aclError aclrtHostUnregister(void *pointer);

aclError aclrtCreateStream(aclrtStream *stream);
aclError aclrtDestroyStream(aclrtStream stream);
aclError aclrtDestroyStreamForce(aclrtStream stream);
aclError aclrtStreamAbort(aclrtStream stream);
aclError aclrtSynchronizeStream(aclrtStream stream);
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t timeout_ms);
aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event);
aclError aclmdlRICaptureGetInfo(aclrtStream stream, aclmdlRICaptureStatus *status, aclmdlRI *graph);

aclError aclrtCreateEventWithFlag(aclrtEvent *event, uint32_t flag);
aclError aclrtCreateEventExWithFlag(aclrtEvent *event, uint32_t flag);
aclError aclrtDestroyEvent(aclrtEvent event);
aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream);
aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus *status);
aclError aclrtSynchronizeEvent(aclrtEvent event);
aclError aclrtSynchronizeEventWithTimeout(aclrtEvent event, int32_t timeout_ms);
aclError aclrtEventElapsedTime(float *milliseconds, aclrtEvent start, aclrtEvent end);

aclError aclrtMemcpyAsync(void *dst, size_t dst_max, const void *src, size_t count, aclrtMemcpyKind kind,
                          aclrtStream stream);
aclError aclrtMemcpyBatchAsync(void **dsts, size_t *dst_maxs, void **srcs, size_t *sizes, size_t num_batches,
                               aclrtMemcpyBatchAttr *attrs, size_t *attrs_indexes, size_t num_attrs,
                               size_t *fail_index, aclrtStream stream);

#endif
