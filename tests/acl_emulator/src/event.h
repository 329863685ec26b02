/* Between stream.c and event.c: one record is one call of aclrtRecordEvent, shared by the event and those who wait. */
#ifndef ACL_EMULATOR_EVENT_H
#define ACL_EMULATOR_EVENT_H

#include <time.h>

#include "emulator.h"

typedef struct emu_record emu_record;

void emu_complete_record(emu_record *record);
bool emu_record_done(const emu_record *record);
void emu_release_record(emu_record *record);
void emu_enqueue_record(emu_stream *stream, emu_record *record);
void emu_enqueue_wait(emu_stream *stream, emu_record *record);
struct timespec emu_deadline(int32_t timeout_ms);
bool emu_wait_changed(const struct timespec *deadline); /* false: the deadline passed */

#endif
