/* Stands in for the driver's libnvidia-ml.so.1: eight GPUs on two NUMA nodes, NVLink within each.
 *
 * FAKE_NVML=init    the driver does not start
 * FAKE_NVML=lost    GPU 2 of NVML's order cannot even be opened
 * FAKE_NVML=bridge  no links but from 0 to 7, and from 7 to 1
 *
 * FAKE_NVML_STATE is a file of lines that is read again at each call:
 *   lost GPU              it has fallen off the bus
 *   hang                  readings never come back
 *   hang_init             starting the driver never comes back
 *   process GPU PID BYTES a process computes on it
 *   slow GPU MASK         reasons why its clocks are held down
 *   rows GPU PENDING FAILED
 *   recovery GPU ACTION   what the driver says that it needs
 *   event GPU TYPE DATA   each line is told once, to those who wait already
 */
#include <libgen.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9 };
enum { TIMEOUT = 10, GPU_IS_LOST = 15, RECOVERY_FIELD = 230, GPUS = 8 };

typedef struct { int index; } Device;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } PciInfo;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned gpu, memory; } Utilization;
typedef struct { unsigned pid; unsigned long long bytes; unsigned gpu_instance, compute_instance; } Process;
typedef struct { Device *device; unsigned long long type, data; unsigned gpu_instance, compute_instance; } Event;
typedef struct { unsigned field, scope; long long time, latency; int type, status; unsigned long long value; } Field;

static Device devices[GPUS] = {{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}};
static int events_told;

static int told(const char *what) {
    const char *wish = getenv("FAKE_NVML");
    return wish && strcmp(wish, what) == 0;
}

/* Find the line number `skip` of this kind, for a GPU or with -1 for any; return how many numbers it has. */
static int state(const char *kind, int gpu, int skip, int *whose, unsigned long long *first, unsigned long long *second) {
    const char *path = getenv("FAKE_NVML_STATE");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[128], word[32];
    int found = -1;
    while (file && found < 0 && fgets(line, sizeof line, file)) {
        int index = -1;
        unsigned long long one = 0, other = 0;
        int count = sscanf(line, "%31s %d %llu %llu", word, &index, &one, &other);
        if (count < 1 || strcmp(word, kind) || (gpu >= 0 && index != gpu) || skip-- > 0) continue;
        if (whose) *whose = index;
        if (first) *first = one;
        if (second) *second = other;
        found = count - 1;
    }
    if (file) fclose(file);
    return found;
}

static void may_hang(const char *kind) {
    while (state(kind, -1, 0, NULL, NULL, NULL) >= 0) pause();
}

static int lost(Device *device) { return state("lost", device->index, 0, NULL, NULL, NULL) >= 0; }

int nvmlInitWithFlags(unsigned flags) {
    may_hang("hang_init");
    return told("init") ? DRIVER_NOT_LOADED : SUCCESS;
}
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { return code == DRIVER_NOT_LOADED ? "Driver Not Loaded" : "GPU is lost"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = GPUS; return SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **device) {
    if (index >= GPUS) return INVALID_ARGUMENT;
    if (index == 2 && told("lost")) return GPU_IS_LOST;
    /* NVML's order is not the bus's: show the last one first. */
    *device = &devices[GPUS - 1 - index];
    return lost(*device) ? GPU_IS_LOST : SUCCESS;
}

int nvmlDeviceGetUUID(Device *device, char *uuid, unsigned length) {
    snprintf(uuid, length, "GPU-00000000-0000-0000-0000-00000000000%d", device->index);
    return SUCCESS;
}

int nvmlDeviceGetName(Device *device, char *name, unsigned length) {
    snprintf(name, length, device->index ? "NVIDIA A100-SXM4-80GB" : "Tesla V100-SXM2-32GB");
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(Device *device, Memory *memory) {
    memory->total = 80ULL << 30;
    memory->free = memory->total;
    memory->used = 0;
    return SUCCESS;
}

int nvmlDeviceGetPciInfo_v3(Device *device, PciInfo *info) {
    memset(info, 0, sizeof *info);
    info->bus = 0x10 * (device->index + 1);
    snprintf(info->bus_id, sizeof info->bus_id, "00000000:%02X:00.0", info->bus);
    return SUCCESS;
}

int nvmlDeviceGetMinorNumber(Device *device, unsigned *minor) { *minor = device->index; return SUCCESS; }

int nvmlDeviceGetMemoryAffinity(Device *device, unsigned words, unsigned long long *set, int scope) {
    memset(set, 0, words * sizeof *set);
    set[0] = 1ULL << (device->index / (GPUS / 2));
    return SUCCESS;
}

int nvmlDeviceGetP2PStatus(Device *one, Device *other, int index, int *status) {
    int low = one->index < other->index ? one->index : other->index, high = one->index + other->index - low;
    int linked = told("bridge") ? high == 7 && low < 2 : low / (GPUS / 2) == high / (GPUS / 2);
    *status = index == 2 && linked ? 0 : 6;
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(Device *device, Utilization *rates) {
    rates->gpu = 10 * (device->index + 1);
    rates->memory = 0;
    return SUCCESS;
}

int nvmlDeviceGetTemperature(Device *device, int sensor, unsigned *celsius) {
    *celsius = 40 + device->index;
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Device *device, unsigned *count, Process *processes) {
    unsigned long long pid, bytes;
    unsigned found = 0;
    may_hang("hang");
    if (lost(device)) return GPU_IS_LOST;
    while (state("process", device->index, found, NULL, &pid, &bytes) >= 0) {
        if (processes && found < *count) processes[found] = (Process){(unsigned)pid, bytes, 0, 0};
        found++;
    }
    int enough = found <= *count;
    *count = found;
    return enough ? SUCCESS : INSUFFICIENT_SIZE;
}

int nvmlDeviceGetCurrentClocksEventReasons(Device *device, unsigned long long *reasons) {
    *reasons = 0;
    state("slow", device->index, 0, NULL, reasons, NULL);
    return SUCCESS;
}

int nvmlDeviceGetRemappedRows(Device *device, unsigned *corrected, unsigned *not, unsigned *pending, unsigned *failed) {
    unsigned long long waits = 0, fails = 0;
    state("rows", device->index, 0, NULL, &waits, &fails);
    *corrected = *not = 0;
    *pending = waits;
    *failed = fails;
    return SUCCESS;
}

int nvmlDeviceGetRetiredPagesPendingStatus(Device *device, int *pending) { return NOT_SUPPORTED; }

int nvmlDeviceGetFieldValues(Device *device, int count, Field *fields) {
    for (int index = 0; index < count; index++) {
        fields[index].status = fields[index].field == RECOVERY_FIELD ? SUCCESS : NOT_SUPPORTED;
        fields[index].value = 0;
        state("recovery", device->index, 0, NULL, &fields[index].value, NULL);
    }
    return SUCCESS;
}

int nvmlEventSetCreate(void **set) {
    *set = &events_told;
    while (state("event", -1, events_told, NULL, NULL, NULL) >= 0) events_told++;
    return SUCCESS;
}

int nvmlDeviceRegisterEvents(Device *device, unsigned long long types, void *set) {
    return types & 2 && device->index == 0 ? NOT_SUPPORTED : SUCCESS; /* the first one has no ECC */
}

/* Told when the file of lines is replaced: the driver's own wait costs nothing either. */
static int watch_state(void) {
    static int watched = -1;
    const char *path = getenv("FAKE_NVML_STATE");
    char folder[512];
    if (watched < 0 && path) {
        snprintf(folder, sizeof folder, "%s", path);
        watched = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
        inotify_add_watch(watched, dirname(folder), IN_MOVED_TO);
    }
    return watched;
}

static long long milliseconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000LL + now.tv_nsec / 1000000;
}

int nvmlEventSetWait_v2(void *set, Event *event, unsigned milliseconds) {
    struct pollfd news = {watch_state(), POLLIN, 0};
    long long end = milliseconds_now() + milliseconds;
    char told_of[4096];
    int gpu;
    for (;;) {
        while (read(news.fd, told_of, sizeof told_of) > 0) continue;
        if (state("event", -1, events_told, &gpu, &event->type, &event->data) >= 0) {
            events_told++;
            event->device = &devices[gpu];
            return SUCCESS;
        }
        long long left = end - milliseconds_now();
        if (left <= 0 || poll(&news, 1, (int)left) == 0) return TIMEOUT;
    }
}
