/* Shared between the emulator's files. One lock guards all state; it is never held while bytes are copied. */
#ifndef ACL_EMULATOR_H
#define ACL_EMULATOR_H

#include <pthread.h>
#include <stdbool.h>

#include "acl_abi.h"
#include "control.h"

extern pthread_mutex_t emu_lock;
extern pthread_cond_t emu_changed;
extern emu_live_counts emu_counts;

/* calls.c: the log, faults and error text. Every public function begins with EMU_ENTER and ends with emu_done. */
bool emu_faulted(const char *function, aclError *code);
aclError emu_done(const char *function, aclError code, const char *format, ...) __attribute__((format(printf, 3, 4)));
aclError emu_error(aclError code, const char *format, ...) __attribute__((format(printf, 2, 3)));
aclError emu_copy_fault(void);
int emu_copy_delay_us(void);

#define EMU_ENTER(function)                                                                                            \
    do {                                                                                                               \
        aclError injected;                                                                                             \
        if (emu_faulted(function, &injected)) {                                                                        \
            emu_error(injected, "%s: injected fault", function);                                                       \
            return emu_done(function, injected, "injected");                                                           \
        }                                                                                                              \
    } while (0)

/* system.c */
int emu_current_device(void); /* -1 before aclrtSetDevice on this thread */

/* memory.c; the lock is held by the caller */
bool emu_is_device(const void *pointer, size_t size);   /* the whole span */
bool emu_touches_device(const void *pointer, size_t size); /* any part of it */
bool emu_is_pinned(const void *pointer, size_t size);   /* inside one registered range */

/* stream.c */
typedef struct emu_stream emu_stream;
typedef struct {
    void **dsts, **srcs; /* the caller's arrays, read when the copy runs: the documentation promises no copy of them */
    size_t *sizes;
    size_t count;
    uint64_t fingerprint; /* of those arrays when the call was made */
    void *dst, *src;      /* a single copy's own descriptor */
    size_t size;
} emu_copy;

aclError emu_find_stream(aclrtStream handle, emu_stream **stream); /* also checks device and context; lock held */
void emu_enqueue_copy(emu_stream *stream, const emu_copy *copy);    /* lock held */
aclError emu_drain(emu_stream *stream, int32_t timeout_ms);         /* lock held; waits */
uint64_t emu_fingerprint(void **dsts, void **srcs, const size_t *sizes, size_t count);
void emu_run_copy(const emu_copy *copy, aclError *failed); /* lock not held */

#endif
