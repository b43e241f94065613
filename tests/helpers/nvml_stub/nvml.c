/* libnvidia-ml.so.1 for tests: the functions the sampler calls, answering from a trace.
 *
 * The trace named by NVML_STUB_TRACE has one line per state of the device: `key=value` words, `#` starts a comment.
 * A key keeps its value on later lines, except `repeat` (samples the line lasts, 1 if absent) and `xid` (events that
 * arrive with the line's first sample). Values are in NVML's own units; `na` means that the device cannot tell.
 * stub_advance() moves on by one sample; the last line lasts for ever.
 */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
       DRIVER_NOT_LOADED = 9, TIMEOUT = 10, FUNCTION_NOT_FOUND = 13 };
enum { MAX_LINES = 256, MAX_PROCS = 8, MAX_XIDS = 16 };
enum { GPU = 1, MIG_INSTANCE = 2 };
static const unsigned long long NA = ~0ULL;

typedef unsigned long long u64;
typedef struct { unsigned pid; u64 bytes; unsigned use; } Proc;

/* `error` is what every call about the device returns; `init` what nvmlInit returns. */
typedef struct {
    u64 repeat, sm_use, mem_use, mem_total, mem_free, sm_clock, sm_clock_max, power_mw, power_limit_mw, temp,
        temp_slowdown, throttle, ecc_corrected, ecc_uncorrected, mig, gpus, init, error, process_use, old_names;
    Proc procs[MAX_PROCS];
    int num_procs;
    unsigned xids[MAX_XIDS];
    int num_xids;
} Line;

typedef struct { const char* key; size_t offset; } Field;
#define FIELD(name) { #name, offsetof(Line, name) }
static const Field FIELDS[] = {
    FIELD(repeat), FIELD(sm_use), FIELD(mem_use), FIELD(mem_total), FIELD(mem_free), FIELD(sm_clock),
    FIELD(sm_clock_max), FIELD(power_mw), FIELD(power_limit_mw), FIELD(temp), FIELD(temp_slowdown), FIELD(throttle),
    FIELD(ecc_corrected), FIELD(ecc_uncorrected), FIELD(mig), FIELD(gpus), FIELD(init), FIELD(error),
    FIELD(process_use), FIELD(old_names),
};

static Line lines[MAX_LINES];
static int num_lines, current, inits;
static u64 samples_left;
static unsigned pending[MAX_XIDS];
static int num_pending;

static u64 number(const char* text) { return strcmp(text, "na") == 0 ? NA : strtoull(text, NULL, 0); }

static void read_procs(Line* line, char* text) {
    char* save = NULL;
    line->num_procs = 0;
    for (char* item = strtok_r(text, ",", &save); item; item = strtok_r(NULL, ",", &save)) {
        char pid[32], bytes[32];
        unsigned use = 0;
        if (line->num_procs == MAX_PROCS || sscanf(item, "%31[^:]:%31[^:]:%u", pid, bytes, &use) < 2) abort();
        Proc* proc = &line->procs[line->num_procs++];
        proc->pid = strcmp(pid, "self") == 0 ? (unsigned)getpid() : (unsigned)number(pid);
        proc->bytes = number(bytes);
        proc->use = use;
    }
}

static void read_word(Line* line, char* word) {
    char* value = strchr(word, '=');
    if (!value) abort();
    *value++ = '\0';
    if (strcmp(word, "procs") == 0) { read_procs(line, strcmp(value, "none") == 0 ? value + 4 : value); return; }
    if (strcmp(word, "xid") == 0) {
        char* save = NULL;
        for (char* item = strtok_r(value, ",", &save); item; item = strtok_r(NULL, ",", &save))
            line->xids[line->num_xids++] = (unsigned)number(item);
        return;
    }
    for (size_t i = 0; i < sizeof FIELDS / sizeof *FIELDS; ++i)
        if (strcmp(word, FIELDS[i].key) == 0) { *(u64*)((char*)line + FIELDS[i].offset) = number(value); return; }
    fprintf(stderr, "trace: unknown key '%s'\n", word);
    abort();
}

static void enter(int index) {
    current = index;
    samples_left = lines[index].repeat;
    for (int i = 0; i < lines[index].num_xids && num_pending < MAX_XIDS; ++i)
        pending[num_pending++] = lines[index].xids[i];
}

__attribute__((constructor)) static void read_trace(void) {
    const char* path = getenv("NVML_STUB_TRACE");
    FILE* file = path ? fopen(path, "r") : NULL;
    char text[1024];
    Line line = { .gpus = 1, .temp_slowdown = NA, .ecc_corrected = NA, .ecc_uncorrected = NA, .process_use = 1 };
    if (!file) { fprintf(stderr, "NVML_STUB_TRACE names no readable trace\n"); abort(); }
    while (fgets(text, sizeof text, file)) {
        text[strcspn(text, "#\n")] = '\0';
        char* save = NULL;
        char* word = strtok_r(text, " \t", &save);
        if (!word) continue;
        line.repeat = 1;
        line.num_xids = 0;
        for (; word; word = strtok_r(NULL, " \t", &save)) read_word(&line, word);
        if (num_lines == MAX_LINES) abort();
        lines[num_lines++] = line;
    }
    fclose(file);
    if (num_lines == 0) abort();
    enter(0);
}

/* Move on by one sample; returns 0 when the trace is over. */
int stub_advance(void) {
    if (--samples_left > 0) return 1;
    if (current + 1 == num_lines) { samples_left = 1; return 0; }
    enter(current + 1);
    return 1;
}

#define LINE (&lines[current])
#define DEVICE_CALL() do { if (inits == 0 || LINE->init) return UNINITIALIZED; \
                           if (LINE->error) return (int)LINE->error; } while (0)
/* What a MIG instance has no answer to of its own. */
#define BOARD_CALL() do { DEVICE_CALL(); if (device == (void*)MIG_INSTANCE) return NOT_SUPPORTED; } while (0)
#define ANSWER(field, type) do { if (LINE->field == NA) return NOT_SUPPORTED; *out = (type)LINE->field; \
                                 return SUCCESS; } while (0)

int nvmlInitWithFlags(unsigned flags) { (void)flags; if (LINE->init) return (int)LINE->init; ++inits; return SUCCESS; }
int nvmlShutdown(void) { if (inits == 0) return UNINITIALIZED; --inits; return SUCCESS; }
const char* nvmlErrorString(int code) { (void)code; return "stub error"; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** out) {
    DEVICE_CALL();
    if (index >= LINE->gpus) return INVALID_ARGUMENT;
    *out = (void*)GPU;
    return SUCCESS;
}
int nvmlDeviceGetHandleByUUID(const char* uuid, void** out) {
    DEVICE_CALL();
    if (strcmp(uuid, "GPU-0") == 0) *out = (void*)GPU;
    else if (strcmp(uuid, "MIG-0") == 0 && LINE->mig == 1) *out = (void*)MIG_INSTANCE;
    else return NOT_FOUND;
    return SUCCESS;
}
int nvmlDeviceIsMigDeviceHandle(void* device, unsigned* out) {
    DEVICE_CALL();
    *out = device == (void*)MIG_INSTANCE;
    return SUCCESS;
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void* device, void** out) {
    DEVICE_CALL();
    if (device != (void*)MIG_INSTANCE) return INVALID_ARGUMENT;
    *out = (void*)GPU;
    return SUCCESS;
}
int nvmlDeviceGetMigMode(void* device, unsigned* now, unsigned* later) {
    BOARD_CALL();
    if (LINE->mig == NA) return NOT_SUPPORTED;
    *now = *later = (unsigned)LINE->mig;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(void* device, u64* out) {
    DEVICE_CALL();
    /* An instance has a half of the GPU. */
    const u64 parts = device == (void*)MIG_INSTANCE ? 2 : 1;
    out[0] = LINE->mem_total / parts;
    out[1] = LINE->mem_free / parts;
    out[2] = out[0] - out[1];
    return SUCCESS;
}
int nvmlDeviceGetUtilizationRates(void* device, unsigned* out) {
    BOARD_CALL();
    if (LINE->sm_use == NA || LINE->mig == 1) return NOT_SUPPORTED;
    out[0] = (unsigned)LINE->sm_use;
    out[1] = (unsigned)LINE->mem_use;
    return SUCCESS;
}
int nvmlDeviceGetClockInfo(void* device, int type, unsigned* out) {
    BOARD_CALL();
    if (type != 1) return INVALID_ARGUMENT;
    ANSWER(sm_clock, unsigned);
}
int nvmlDeviceGetMaxClockInfo(void* device, int type, unsigned* out) {
    BOARD_CALL();
    if (type != 1) return INVALID_ARGUMENT;
    ANSWER(sm_clock_max, unsigned);
}
int nvmlDeviceGetPowerUsage(void* device, unsigned* out) { BOARD_CALL(); ANSWER(power_mw, unsigned); }
int nvmlDeviceGetEnforcedPowerLimit(void* device, unsigned* out) { BOARD_CALL(); ANSWER(power_limit_mw, unsigned); }
int nvmlDeviceGetTemperature(void* device, int sensor, unsigned* out) {
    BOARD_CALL();
    if (sensor != 0) return INVALID_ARGUMENT;
    ANSWER(temp, unsigned);
}
int nvmlDeviceGetTemperatureThreshold(void* device, int which, unsigned* out) {
    BOARD_CALL();
    if (which != 1) return INVALID_ARGUMENT;
    ANSWER(temp_slowdown, unsigned);
}
int nvmlDeviceGetCurrentClocksEventReasons(void* device, u64* out) {
    BOARD_CALL();
    if (LINE->old_names) return FUNCTION_NOT_FOUND;
    ANSWER(throttle, u64);
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void* device, u64* out) { BOARD_CALL(); ANSWER(throttle, u64); }
int nvmlDeviceGetTotalEccErrors(void* device, int kind, int counter, u64* out) {
    BOARD_CALL();
    if (counter != 0) return INVALID_ARGUMENT;
    if (kind == 0) ANSWER(ecc_corrected, u64);
    ANSWER(ecc_uncorrected, u64);
}

int nvmlDeviceGetSupportedEventTypes(void* device, u64* out) { BOARD_CALL(); *out = 0x8; return SUCCESS; }
int nvmlEventSetCreate(void** out) { DEVICE_CALL(); *out = (void*)7; return SUCCESS; }
int nvmlEventSetFree(void* set) { (void)set; return SUCCESS; }
int nvmlDeviceRegisterEvents(void* device, u64 types, void* set) {
    BOARD_CALL();
    return types == 0x8 && set == (void*)7 ? SUCCESS : INVALID_ARGUMENT;
}
typedef struct { void* device; u64 type, data; unsigned instance, compute; } EventData;
int nvmlEventSetWait_v2(void* set, EventData* out, unsigned timeout_ms) {
    (void)set, (void)timeout_ms;
    DEVICE_CALL();
    if (num_pending == 0) return TIMEOUT;
    out->device = (void*)GPU;
    out->type = 0x8;
    out->data = pending[0];
    memmove(pending, pending + 1, (size_t)--num_pending * sizeof *pending);
    return SUCCESS;
}

typedef struct { unsigned pid; u64 bytes; unsigned instance, compute; } ProcessInfo;
int nvmlDeviceGetComputeRunningProcesses_v3(void* device, unsigned* count, ProcessInfo* out) {
    (void)device;
    DEVICE_CALL();
    const unsigned have = (unsigned)LINE->num_procs, room = *count;
    *count = have;
    if (have == 0) return SUCCESS;
    if (room < have) return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < have; ++i)
        out[i] = (ProcessInfo){ LINE->procs[i].pid, LINE->procs[i].bytes, ~0U, ~0U };
    return SUCCESS;
}
int nvmlDeviceGetMPSComputeRunningProcesses_v3(void* device, unsigned* count, ProcessInfo* out) {
    (void)device, (void)out;
    DEVICE_CALL();
    *count = 0;
    return SUCCESS;
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(void* device, unsigned* count, ProcessInfo* out) {
    (void)device, (void)count, (void)out;
    DEVICE_CALL();
    return NOT_SUPPORTED;
}

typedef struct { unsigned pid; u64 time_us; unsigned sm, memory, encoder, decoder; } UseSample;
int nvmlDeviceGetProcessUtilization(void* device, UseSample* out, unsigned* count, u64 since_us) {
    struct timeval now;
    BOARD_CALL();
    if (LINE->process_use == 0 || LINE->mig == 1) return NOT_SUPPORTED;
    gettimeofday(&now, NULL);
    const u64 now_us = (u64)now.tv_sec * 1000000 + (u64)now.tv_usec;
    unsigned have = 0;
    /* Like the driver: only of processes that ran, and only within the time asked for. */
    for (int i = 0; i < LINE->num_procs; ++i) have += LINE->procs[i].use > 0;
    if (have == 0 || since_us > now_us) return NOT_FOUND;
    if (!out || *count < have) { *count = have; return INSUFFICIENT_SIZE; }
    *count = 0;
    for (int i = 0; i < LINE->num_procs; ++i)
        if (LINE->procs[i].use > 0)
            out[(*count)++] = (UseSample){ LINE->procs[i].pid, now_us, LINE->procs[i].use, 0, 0, 0 };
    return SUCCESS;
}
