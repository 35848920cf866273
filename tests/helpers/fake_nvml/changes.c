/* Everything else that changes a GPU: remembered, and without effect. */

#include "node.h"

static int change(Device device, const char *function, const char *format, unsigned a,
                  unsigned b) {
    struct Call call = begin(device);
    if (call.result == SUCCESS) call.result = changing_fault(call.gpu);
    record(function, call.gpu, call.result, format, a, b);
    return end(call);
}

#define CHANGES_0(name) \
    EXPORT int name(Device device) { return change(device, #name, "", 0, 0); }
#define CHANGES_1(name) \
    EXPORT int name(Device device, unsigned a) { return change(device, #name, "%u", a, 0); }
#define CHANGES_2(name) \
    EXPORT int name(Device device, unsigned a, unsigned b) { \
        return change(device, #name, "%u,%u", a, b); \
    }
/* The first argument is no device, or further ones are pointers to structures. */
#define CHANGES_X(name) \
    EXPORT int name(void *first) { \
        struct Call call = begin_node(); \
        if (call.result == SUCCESS) call.gpu = gpu_of(first); \
        return told(call, #name); \
    }

CHANGES_0(nvmlDeviceResetApplicationsClocks)
CHANGES_0(nvmlDeviceResetMemoryLockedClocks)
CHANGES_0(nvmlDeviceClearAccountingPids)
CHANGES_0(nvmlDeviceClearCpuAffinity)
CHANGES_0(nvmlDeviceSetCpuAffinity)
CHANGES_1(nvmlDeviceClearEccErrorCounts)
CHANGES_1(nvmlDeviceSetAccountingMode)
CHANGES_1(nvmlDeviceSetAutoBoostedClocksEnabled)
CHANGES_1(nvmlDeviceSetComputeMode)
CHANGES_1(nvmlDeviceSetDefaultFanSpeed_v2)
CHANGES_1(nvmlDeviceSetEccMode)
CHANGES_1(nvmlDeviceSetGpcClkVfOffset)
CHANGES_1(nvmlDeviceSetGpuOperationMode)
CHANGES_1(nvmlDeviceSetMemClkVfOffset)
CHANGES_1(nvmlDeviceSetMigMode)
CHANGES_1(nvmlDeviceSetPersistenceMode)
CHANGES_1(nvmlDeviceSetPowerManagementLimit)
CHANGES_1(nvmlDeviceSetVirtualizationMode)
CHANGES_2(nvmlDeviceSetAPIRestriction)
CHANGES_2(nvmlDeviceSetApplicationsClocks)
CHANGES_2(nvmlDeviceSetDefaultAutoBoostedClocksEnabled)
CHANGES_2(nvmlDeviceSetDriverModel)
CHANGES_2(nvmlDeviceSetFanControlPolicy)
CHANGES_2(nvmlDeviceSetFanSpeed_v2)
CHANGES_2(nvmlDeviceSetMemoryLockedClocks)
CHANGES_X(nvmlDeviceClearFieldValues)
CHANGES_X(nvmlDeviceCreateGpuInstance)
CHANGES_X(nvmlDeviceModifyDrainState)
CHANGES_X(nvmlDevicePowerSmoothingActivatePresetProfile)
CHANGES_X(nvmlDevicePowerSmoothingSetState)
CHANGES_X(nvmlDevicePowerSmoothingUpdatePresetProfileParam)
CHANGES_X(nvmlDeviceRemoveGpu)
CHANGES_X(nvmlDeviceSetClockOffsets)
CHANGES_X(nvmlDeviceSetPowerManagementLimit_v2)
CHANGES_X(nvmlDeviceSetTemperatureThreshold)
CHANGES_X(nvmlDeviceWorkloadPowerProfileClearRequestedProfiles)
CHANGES_X(nvmlDeviceWorkloadPowerProfileSetRequestedProfiles)
CHANGES_X(nvmlGpuInstanceCreateComputeInstance)
CHANGES_X(nvmlGpuInstanceDestroy)
