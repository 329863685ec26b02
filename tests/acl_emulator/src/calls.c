/* The call log, injected faults and the text behind aclGetRecentErrMsg. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "emulator.h"

#define MAX_FAULTS 64
#define MAX_FUNCTIONS 64
#define LOG_LINES 65536
#define LINE_SIZE 160

typedef struct {
    char function[64];
    int calls_until;
    int times;
    aclError code;
} fault;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* never held together with a wait */
static fault faults[MAX_FAULTS];
static int num_faults;
static struct {
    char name[64];
    int64_t calls;
} functions[MAX_FUNCTIONS];
static int num_functions;
static char (*log_lines)[LINE_SIZE];
static int64_t log_written;
static int copy_fault_until, copy_fault_code, copy_delay_us;
static bool environment_read;
static _Thread_local char message[512];
static _Thread_local char message_given[512];

static void add_fault(const char *function, int nth, int code, int times) {
    if (num_faults < MAX_FAULTS) {
        fault *added = &faults[num_faults++];
        snprintf(added->function, sizeof added->function, "%s", function);
        added->calls_until = nth;
        added->times = times;
        added->code = code;
    }
}

/* ACL_EMULATOR_FAULTS="aclrtMemcpyAsync:3:207001,aclrtHostRegisterV2:1:507899": function, nth call, code. */
static void read_environment(void) {
    if (environment_read) {
        return;
    }
    environment_read = true;
    const char *given = getenv("ACL_EMULATOR_FAULTS");
    while (given != NULL && *given != '\0') {
        char function[64];
        int nth, code, length = 0;
        if (sscanf(given, "%63[^:]:%d:%d%n", function, &nth, &code, &length) != 3) {
            fprintf(stderr, "acl emulator: cannot read ACL_EMULATOR_FAULTS at '%s'\n", given);
            abort();
        }
        add_fault(function, nth, code, 1);
        given += length + (given[length] == ',' ? 1 : 0);
    }
}

bool emu_faulted(const char *function, aclError *code) {
    bool faulted = false;
    pthread_mutex_lock(&lock);
    read_environment();
    int at = 0;
    while (at < num_functions && strcmp(functions[at].name, function) != 0) {
        at++;
    }
    if (at == num_functions && at < MAX_FUNCTIONS) {
        snprintf(functions[at].name, sizeof functions[at].name, "%s", function);
        functions[at].calls = 0;
        num_functions++;
    }
    if (at < MAX_FUNCTIONS) {
        functions[at].calls++;
    }
    for (int i = 0; i < num_faults && !faulted; i++) {
        fault *it = &faults[i];
        if (strcmp(it->function, function) != 0 || it->times == 0) {
            continue;
        }
        if (it->calls_until > 1) {
            it->calls_until--;
            continue;
        }
        it->times--;
        *code = it->code;
        faulted = true;
    }
    pthread_mutex_unlock(&lock);
    return faulted;
}

aclError emu_done(const char *function, aclError code, const char *format, ...) {
    char text[LINE_SIZE];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    pthread_mutex_lock(&lock);
    if (log_lines == NULL) {
        log_lines = calloc(LOG_LINES, LINE_SIZE);
    }
    if (log_lines != NULL) {
        /* a long argument list is cut; the code is not */
        snprintf(log_lines[log_written % LOG_LINES], LINE_SIZE, "%d %.40s %.100s", code, function, text);
        log_written++;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

aclError emu_error(aclError code, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    return code;
}

const char *aclGetRecentErrMsg(void) {
    /* documented: the text of this thread's last failure; asking clears it */
    memcpy(message_given, message, sizeof message);
    message[0] = '\0';
    return message_given[0] == '\0' ? NULL : message_given;
}

aclError emu_copy_fault(void) {
    aclError code = ACL_SUCCESS;
    pthread_mutex_lock(&lock);
    if (copy_fault_until > 0 && --copy_fault_until == 0) {
        code = copy_fault_code;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

int emu_copy_delay_us(void) {
    pthread_mutex_lock(&lock);
    int delay = copy_delay_us;
    pthread_mutex_unlock(&lock);
    return delay;
}

void emu_fail(const char *function, int nth, int code, int times) {
    pthread_mutex_lock(&lock);
    add_fault(function, nth, code, times);
    pthread_mutex_unlock(&lock);
}

void emu_fail_copy(int nth, int code) {
    pthread_mutex_lock(&lock);
    copy_fault_until = nth;
    copy_fault_code = code;
    pthread_mutex_unlock(&lock);
}

void emu_clear_faults(void) {
    pthread_mutex_lock(&lock);
    num_faults = 0;
    copy_fault_until = 0;
    pthread_mutex_unlock(&lock);
}

void emu_delay_copies(int microseconds) {
    pthread_mutex_lock(&lock);
    copy_delay_us = microseconds;
    pthread_mutex_unlock(&lock);
}

int64_t emu_calls(const char *function) {
    int64_t calls = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < num_functions; i++) {
        if (strcmp(functions[i].name, function) == 0) {
            calls = functions[i].calls;
        }
    }
    pthread_mutex_unlock(&lock);
    return calls;
}

int64_t emu_log_size(void) {
    pthread_mutex_lock(&lock);
    int64_t size = log_written < LOG_LINES ? log_written : LOG_LINES;
    pthread_mutex_unlock(&lock);
    return size;
}

int emu_log_line(int64_t index, char *line, size_t size) {
    int found = 0;
    pthread_mutex_lock(&lock);
    int64_t first = log_written < LOG_LINES ? 0 : log_written - LOG_LINES;
    if (index >= 0 && first + index < log_written) {
        snprintf(line, size, "%s", log_lines[(first + index) % LOG_LINES]);
        found = 1;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

void emu_reset_calls(void);
void emu_reset_calls(void) {
    pthread_mutex_lock(&lock);
    num_faults = 0;
    num_functions = 0;
    log_written = 0;
    copy_fault_until = 0;
    copy_delay_us = 0;
    free(log_lines);
    log_lines = NULL;
    pthread_mutex_unlock(&lock);
}
