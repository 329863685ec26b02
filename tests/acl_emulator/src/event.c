/* Events of both sorts. Those of aclrtCreateEventExWithFlag may be recorded again and again; a wait keeps the record
 * it saw. Those of aclrtCreateEventWithFlag must be reset before they are recorded again, which the emulator takes
 * strictly: a second record is refused. */
#include <stdlib.h>

#include "event.h"

struct emu_record {
    int references;
    bool done;
    int64_t nanoseconds;
};

typedef struct event {
    struct event *next;
    uint32_t flag;
    bool reusable;
    emu_record *record;
} event;

static event *events;

void emu_complete_record(emu_record *record) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    record->nanoseconds = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    record->done = true;
}

bool emu_record_done(const emu_record *record) { return record->done; }

void emu_release_record(emu_record *record) {
    if (--record->references == 0) {
        free(record);
    }
}

static event *find(aclrtEvent handle) {
    for (event *it = events; it != NULL; it = it->next) {
        if (it == handle) {
            return it;
        }
    }
    return NULL;
}

static aclError create(aclrtEvent *handle, uint32_t flag, bool reusable) {
    if (handle == NULL || (flag & ~(ACL_EVENT_SYNC | ACL_EVENT_TIME_LINE)) != 0 || flag == 0) {
        return emu_error(ACL_ERROR_RT_PARAM_INVALID, "event flag 0x%x", flag);
    }
    if (emu_current_device() < 0) {
        return emu_error(ACL_ERROR_RT_CONTEXT_NULL, "no device was set on this thread");
    }
    event *created = calloc(1, sizeof *created);
    if (created == NULL) {
        return emu_error(ACL_ERROR_RT_MEMORY_ALLOCATION, "no event");
    }
    pthread_mutex_lock(&emu_lock);
    *created = (event){.next = events, .flag = flag, .reusable = reusable};
    events = created;
    emu_counts.events++;
    pthread_mutex_unlock(&emu_lock);
    *handle = created;
    return ACL_SUCCESS;
}

aclError aclrtCreateEventWithFlag(aclrtEvent *handle, uint32_t flag) {
    EMU_ENTER("aclrtCreateEventWithFlag");
    return emu_done("aclrtCreateEventWithFlag", create(handle, flag, false), "flag=0x%x", flag);
}

#ifndef WITHOUT_EVENT_EX
aclError aclrtCreateEventExWithFlag(aclrtEvent *handle, uint32_t flag) {
    EMU_ENTER("aclrtCreateEventExWithFlag");
    return emu_done("aclrtCreateEventExWithFlag", create(handle, flag, true), "flag=0x%x", flag);
}
#endif

aclError aclrtDestroyEvent(aclrtEvent handle) {
    EMU_ENTER("aclrtDestroyEvent");
    pthread_mutex_lock(&emu_lock);
    event *it = find(handle);
    aclError code = ACL_SUCCESS;
    if (it == NULL) {
        code = emu_error(ACL_ERROR_RT_PARAM_INVALID, "%p is no event", handle);
    } else {
        event **at = &events;
        while (*at != it) {
            at = &(*at)->next;
        }
        *at = it->next;
        if (it->record != NULL) {
            emu_release_record(it->record);
        }
        free(it);
        emu_counts.events--;
    }
    pthread_mutex_unlock(&emu_lock);
    return emu_done("aclrtDestroyEvent", code, "-");
}

aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream_handle) {
    EMU_ENTER("aclrtRecordEvent");
    pthread_mutex_lock(&emu_lock);
    emu_stream *stream = NULL;
    aclError code = emu_find_stream(stream_handle, &stream);
    event *it = find(handle);
    if (code == ACL_SUCCESS && it == NULL) {
        code = emu_error(ACL_ERROR_RT_PARAM_INVALID, "%p is no event", handle);
    } else if (code == ACL_SUCCESS && it->record != NULL && !it->reusable) {
        code = emu_error(ACL_ERROR_RT_PARAM_INVALID, "recorded again without a reset");
    }
    if (code == ACL_SUCCESS) {
        emu_record *record = calloc(1, sizeof *record);
        if (record == NULL) {
            code = emu_error(ACL_ERROR_RT_MEMORY_ALLOCATION, "no record");
        } else {
            record->references = 2; /* the event, the task */
            if (it->record != NULL) {
                emu_release_record(it->record);
            }
            it->record = record;
            emu_enqueue_record(stream, record);
        }
    }
    pthread_mutex_unlock(&emu_lock);
    return emu_done("aclrtRecordEvent", code, "stream=%p", stream_handle);
}

aclError aclrtStreamWaitEvent(aclrtStream stream_handle, aclrtEvent handle) {
    EMU_ENTER("aclrtStreamWaitEvent");
    pthread_mutex_lock(&emu_lock);
    emu_stream *stream = NULL;
    aclError code = emu_find_stream(stream_handle, &stream);
    event *it = find(handle);
    if (code == ACL_SUCCESS && (it == NULL || (it->flag & ACL_EVENT_SYNC) == 0)) {
        code = emu_error(ACL_ERROR_RT_PARAM_INVALID, "%p is no event to wait for", handle);
    }
    if (code == ACL_SUCCESS && it->record != NULL) {
        it->record->references++;
        emu_enqueue_wait(stream, it->record);
    }
    pthread_mutex_unlock(&emu_lock);
    return emu_done("aclrtStreamWaitEvent", code, "stream=%p", stream_handle);
}

/* Before the first record: nothing to wait for with a reusable event, "not ready" with the other sort. */
static bool complete(const event *it) { return it->record == NULL ? it->reusable : it->record->done; }

aclError aclrtQueryEventStatus(aclrtEvent handle, aclrtEventRecordedStatus *status) {
    EMU_ENTER("aclrtQueryEventStatus");
    pthread_mutex_lock(&emu_lock);
    event *it = find(handle);
    aclError code = ACL_SUCCESS;
    if (it == NULL || status == NULL) {
        code = emu_error(ACL_ERROR_RT_PARAM_INVALID, "%p is no event", handle);
    } else {
        *status = complete(it) ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
    }
    pthread_mutex_unlock(&emu_lock);
    return emu_done("aclrtQueryEventStatus", code, "-");
}

static aclError synchronize(aclrtEvent handle, int32_t timeout_ms) {
    struct timespec deadline = emu_deadline(timeout_ms);
    pthread_mutex_lock(&emu_lock);
    event *it = find(handle);
    aclError code = it == NULL ? emu_error(ACL_ERROR_RT_PARAM_INVALID, "%p is no event", handle) : ACL_SUCCESS;
    while (code == ACL_SUCCESS && !complete(it)) {
        if (!emu_wait_changed(timeout_ms < 0 ? NULL : &deadline) && !complete(it)) {
            code = emu_error(ACL_ERROR_RT_EVENT_SYNC_TIMEOUT, "not recorded after %d ms", timeout_ms);
        }
    }
    pthread_mutex_unlock(&emu_lock);
    return code;
}

aclError aclrtSynchronizeEvent(aclrtEvent handle) {
    EMU_ENTER("aclrtSynchronizeEvent");
    return emu_done("aclrtSynchronizeEvent", synchronize(handle, -1), "-");
}

#ifndef WITHOUT_EVENT_TIMEOUT
aclError aclrtSynchronizeEventWithTimeout(aclrtEvent handle, int32_t timeout_ms) {
    EMU_ENTER("aclrtSynchronizeEventWithTimeout");
    return emu_done("aclrtSynchronizeEventWithTimeout", synchronize(handle, timeout_ms), "timeout=%d", timeout_ms);
}
#endif

aclError aclrtEventElapsedTime(float *milliseconds, aclrtEvent start, aclrtEvent end) {
    EMU_ENTER("aclrtEventElapsedTime");
    pthread_mutex_lock(&emu_lock);
    event *first = find(start), *second = find(end);
    aclError code = ACL_SUCCESS;
    if (milliseconds == NULL || first == NULL || second == NULL ||
        (first->flag & second->flag & ACL_EVENT_TIME_LINE) == 0 || first->record == NULL || second->record == NULL ||
        !first->record->done || !second->record->done) {
        code = emu_error(ACL_ERROR_RT_PARAM_INVALID, "both events must be complete and have a time line");
    } else {
        *milliseconds = (float)(second->record->nanoseconds - first->record->nanoseconds) / 1e6f;
    }
    pthread_mutex_unlock(&emu_lock);
    return emu_done("aclrtEventElapsedTime", code, "-");
}
