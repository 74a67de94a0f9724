/* Stands in for the driver's libnvidia-ml.so.1: four GPUs on two NUMA nodes.
 *
 * FAKE_NVML=init    the driver does not start
 * FAKE_NVML=lost    GPU 2 has fallen off the bus
 * FAKE_NVML=bridge  GPU 0 has a link to 3, and 3 one to 1
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15 };
enum { GPUS = 4 };

typedef struct { int index; } Device;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } PciInfo;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned gpu, memory; } Utilization;

static Device devices[GPUS] = {{0}, {1}, {2}, {3}};

static int told(const char *what) {
    const char *wish = getenv("FAKE_NVML");
    return wish && strcmp(wish, what) == 0;
}

int nvmlInitWithFlags(unsigned flags) { return told("init") ? DRIVER_NOT_LOADED : SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { return code == DRIVER_NOT_LOADED ? "Driver Not Loaded" : "GPU is lost"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = GPUS; return SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **device) {
    if (index >= GPUS) return INVALID_ARGUMENT;
    if (index == 2 && told("lost")) return GPU_IS_LOST;
    /* NVML's order is not the bus's: show the last one first. */
    *device = &devices[GPUS - 1 - index];
    return SUCCESS;
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

int nvmlDeviceGetMemoryAffinity(Device *device, unsigned words, unsigned long long *set, int scope) {
    memset(set, 0, words * sizeof *set);
    set[0] = 1ULL << (device->index / 2);
    return SUCCESS;
}

int nvmlDeviceGetP2PStatus(Device *one, Device *other, int index, int *status) {
    int low = one->index < other->index ? one->index : other->index, high = one->index + other->index - low;
    int linked = told("bridge") ? high == 3 && low < 2 : low / 2 == high / 2;
    *status = index == 2 && linked ? 0 : 6;
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(Device *device, Utilization *rates) {
    rates->gpu = 10 * (device->index + 1);
    rates->memory = 0;
    return SUCCESS;
}
