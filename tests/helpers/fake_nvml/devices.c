/* The library's own facts, and which GPU is which. */

#include "node.h"

#include <stdio.h>
#include <string.h>

static int copy_text(char *target, unsigned size, const char *text) {
    if (strlen(text) >= size) return INSUFFICIENT_SIZE;
    strcpy(target, text);
    return SUCCESS;
}

EXPORT int nvmlSystemGetDriverVersion(char *version, unsigned size) {
    struct Call call = begin_node();
    if (call.result == SUCCESS) call.result = copy_text(version, size, node->driver_version);
    return told(call, "nvmlSystemGetDriverVersion");
}

EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = 12080;
    return told(begin_node(), "nvmlSystemGetCudaDriverVersion_v2");
}

EXPORT int nvmlDeviceGetCount_v2(unsigned *count) {
    struct Call call = begin_node();
    if (call.result == SUCCESS) *count = (unsigned)listed_before(node->gpus + node->num_gpus);
    return told(call, "nvmlDeviceGetCount_v2");
}

static int found(struct Call call, const char *function, uint64_t index, Device *device) {
    if (call.result == SUCCESS) {
        if (index < node->num_gpus && !node->gpus[index].faults[FAULT_GONE]) {
            call.gpu = &node->gpus[index];
            call.result = common_fault(call.gpu);
            *device = &handles[index];
        } else {
            call.result = NOT_FOUND;
        }
    }
    return told(call, function);
}

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *device) {
    struct Call call = begin_node();
    uint64_t place = 0; /* that of the listed GPU of this number */
    if (call.result == SUCCESS) {
        while (place < node->num_gpus && listed_before(node->gpus + place + 1) <= index) place++;
        if (place == node->num_gpus) {
            call.result = INVALID_ARGUMENT;
            return told(call, "nvmlDeviceGetHandleByIndex_v2");
        }
    }
    return found(call, "nvmlDeviceGetHandleByIndex_v2", place, device);
}

EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, Device *device) {
    struct Call call = begin_node();
    uint64_t index = 0;
    if (call.result == SUCCESS)
        while (index < node->num_gpus && strcmp(node->gpus[index].uuid, uuid) != 0) index++;
    for (uint64_t i = 0; call.result == SUCCESS && i < node->num_gpus; i++)
        if (node->gpus[i].faults[FAULT_LOST]) call.result = GPU_IS_LOST; /* if any GPU is */
    return found(call, "nvmlDeviceGetHandleByUUID", index, device);
}

EXPORT int nvmlDeviceGetUUID(Device device, char *uuid, unsigned size) {
    struct Call call = begin(device);
    if (call.result == SUCCESS) call.result = copy_text(uuid, size, call.gpu->uuid);
    return told(call, "nvmlDeviceGetUUID");
}

EXPORT int nvmlDeviceGetIndex(Device device, unsigned *index) {
    struct Call call = begin(device);
    if (call.result == SUCCESS) *index = (unsigned)listed_before(call.gpu);
    return told(call, "nvmlDeviceGetIndex");
}

EXPORT int nvmlDeviceGetName(Device device, char *name, unsigned size) {
    struct Call call = begin(device);
    if (call.result == SUCCESS) call.result = copy_text(name, size, call.gpu->name);
    return told(call, "nvmlDeviceGetName");
}

struct PciInfo {
    char legacy_bus_id[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
};

EXPORT int nvmlDeviceGetPciInfo_v3(Device device, struct PciInfo *info) {
    struct Call call = begin(device);
    if (call.result == SUCCESS) {
        memset(info, 0, sizeof *info);
        snprintf(info->bus_id, sizeof info->bus_id, "%s", call.gpu->bus_id);
    }
    return told(call, "nvmlDeviceGetPciInfo_v3");
}

EXPORT int nvmlDeviceGetMigMode(Device device, unsigned *current, unsigned *pending) {
    struct Call call = begin(device);
    if (call.result == SUCCESS && !call.gpu->mig_capable && !call.gpu->faults[FAULT_MIG])
        call.result = NOT_SUPPORTED;
    if (call.result == SUCCESS) *current = *pending = call.gpu->faults[FAULT_MIG] != 0;
    return told(call, "nvmlDeviceGetMigMode");
}

EXPORT int nvmlDeviceGetVirtualizationMode(Device device, unsigned *mode) {
    struct Call call = begin(device);
    if (call.result == SUCCESS) *mode = call.gpu->faults[FAULT_VGPU] ? 2 : 0;
    return told(call, "nvmlDeviceGetVirtualizationMode");
}

struct ProcessInfo {
    unsigned pid;
    unsigned long long used_bytes;
    unsigned gpu_instance, compute_instance;
};

EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(Device device, unsigned *count,
                                                   struct ProcessInfo *processes) {
    struct Call call = begin(device);
    if (call.result == SUCCESS) {
        uint64_t pid = call.gpu->faults[FAULT_PROCESS];
        if (pid && *count < 1) call.result = INSUFFICIENT_SIZE;
        if (pid && *count >= 1) processes[0] = (struct ProcessInfo){(unsigned)pid, 1 << 30, 0, 0};
        *count = pid != 0;
    }
    return told(call, "nvmlDeviceGetComputeRunningProcesses_v3");
}

EXPORT int nvmlDeviceGetUtilizationRates(Device device, unsigned percent[2]) {
    struct Call call = begin(device);
    if (call.result == SUCCESS) {
        percent[0] = (unsigned)call.gpu->faults[FAULT_BUSY_PERCENT];
        percent[1] = 0;
    }
    return told(call, "nvmlDeviceGetUtilizationRates");
}

EXPORT int nvmlDeviceGetTemperature(Device device, unsigned sensor, unsigned *degrees) {
    struct Call call = begin(device);
    if (call.result == SUCCESS && sensor != 0) call.result = INVALID_ARGUMENT;
    if (call.result == SUCCESS && !call.gpu->faults[FAULT_TEMPERATURE_C])
        call.result = NOT_SUPPORTED;
    if (call.result == SUCCESS) *degrees = (unsigned)call.gpu->faults[FAULT_TEMPERATURE_C];
    return told(call, "nvmlDeviceGetTemperature");
}
