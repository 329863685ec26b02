/* What tests ask of the emulator beside the ACL interface. All functions may be called from any thread. */
#ifndef ACL_EMULATOR_CONTROL_H
#define ACL_EMULATOR_CONTROL_H

#include "acl_abi.h"

typedef struct {
    int64_t streams;
    int64_t events;
    int64_t host_registrations;
    int64_t device_allocations;
    int64_t unfinished_tasks;
} emu_live_counts;

/* Forget faults, gates, delays, the call log and ranges given by emu_device_range. */
void emu_reset(void);
void emu_live(emu_live_counts *counts);

/* Ordinary memory becomes device memory: copies then check it, and nothing else may take it for host memory. */
int emu_device_range(void *pointer, size_t size);
int emu_forget_device_range(void *pointer);

/* The nth call from now (1 = the next) of an ACL function returns `code`, `times` times in a row, and does nothing. */
void emu_fail(const char *function, int nth, int code, int times);
/* The nth copy descriptor executed from now fails inside its stream with `code`; the stream is then in error. */
void emu_fail_copy(int nth, int code);
void emu_clear_faults(void);
/* Every copy descriptor takes this much longer. */
void emu_delay_copies(int microseconds);
/* The next batch call copies its first `after` descriptors and then returns `code`. */
void emu_break_batch(int after, int code);

/* "Kernels" on a stream: wait until a gate is opened, and write or check memory. */
int emu_stream_gate(aclrtStream stream, int gate);
void emu_open_gate(int gate);
int emu_stream_fill(aclrtStream stream, void *pointer, int value, size_t size);
int emu_stream_copy_out(aclrtStream stream, void *host, const void *device, size_t size);
/* What is recorded on the stream from now on becomes part of a graph, or no longer does. */
int emu_capture(aclrtStream stream, int captured);
/* Wait until at most this many tasks are unfinished on all streams together; 0 when the time passed first. */
int emu_wait_tasks(int64_t at_most, int32_t timeout_ms);

/* The log of ACL calls, oldest first; at most the last 65536. */
int64_t emu_calls(const char *function);
int64_t emu_log_size(void);
int emu_log_line(int64_t index, char *line, size_t size);

#endif
