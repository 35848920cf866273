/* Clocks, meters, and locked clocks, which outlive the process. */

#include "node.h"

static const struct Segment *segment_of(const struct Gpu *gpu) {
    return &gpu->segments[gpu->active & 1];
}

static uint64_t observed_mhz(const struct Gpu *gpu, uint64_t high_mhz) {
    if (gpu->faults[FAULT_HELD_MHZ]) return gpu->faults[FAULT_HELD_MHZ];
    uint64_t mhz = high_mhz ? high_mhz : gpu->graphics_mhz[0][0];
    uint64_t cap_mhz = gpu->faults[FAULT_CLOCK_CAP_MHZ];
    return cap_mhz && cap_mhz < mhz ? cap_mhz : mhz;
}

static int copy_clocks(unsigned *count, unsigned *clocks, const uint64_t *own, uint64_t num) {
    unsigned room = *count;
    *count = (unsigned)num;
    if (!clocks || room < num) return INSUFFICIENT_SIZE;
    for (uint64_t i = 0; i < num; i++) clocks[i] = (unsigned)own[i];
    return SUCCESS;
}

EXPORT int nvmlDeviceGetSupportedMemoryClocks(Device device, unsigned *count, unsigned *clocks) {
    struct Call call = begin(device);
    if (call.result == SUCCESS)
        call.result = copy_clocks(count, clocks, call.gpu->memory_mhz, call.gpu->num_memory);
    return told(call, "nvmlDeviceGetSupportedMemoryClocks");
}

EXPORT int nvmlDeviceGetSupportedGraphicsClocks(Device device, unsigned memory_mhz,
                                                unsigned *count, unsigned *clocks) {
    struct Call call = begin(device);
    if (call.result == SUCCESS) {
        call.result = NOT_FOUND;
        for (uint64_t i = 0; i < call.gpu->num_memory; i++)
            if (call.gpu->memory_mhz[i] == memory_mhz)
                call.result = copy_clocks(count, clocks, call.gpu->graphics_mhz[i],
                                          call.gpu->num_graphics[i]);
    }
    record("nvmlDeviceGetSupportedGraphicsClocks", call.gpu, call.result, "%u", memory_mhz);
    return end(call);
}

EXPORT int nvmlDeviceGetClockInfo(Device device, unsigned type, unsigned *mhz) {
    struct Call call = begin(device);
    if (call.result == SUCCESS) {
        const struct Gpu *gpu = call.gpu;
        if (type <= 1 || type == 3)
            *mhz = (unsigned)observed_mhz(gpu, segment_of(gpu)->high_mhz);
        else if (type == 2)
            *mhz = (unsigned)gpu->current_memory_mhz;
        else
            call.result = INVALID_ARGUMENT;
    }
    record("nvmlDeviceGetClockInfo", call.gpu, call.result, "%u", type);
    return end(call);
}

static int get_reasons(struct Call call, const char *function, unsigned long long *reasons) {
    if (call.result == SUCCESS) {
        const struct Gpu *gpu = call.gpu;
        uint64_t high_mhz = segment_of(gpu)->high_mhz;
        uint64_t wanted_mhz = high_mhz ? high_mhz : gpu->graphics_mhz[0][0];
        *reasons = gpu->faults[FAULT_THROTTLE_REASONS];
        if (observed_mhz(gpu, high_mhz) < wanted_mhz && !*reasons && !gpu->faults[FAULT_HELD_MHZ])
            *reasons = 4; /* power cap */
    }
    return told(call, function);
}

EXPORT int nvmlDeviceGetCurrentClocksThrottleReasons(Device device, unsigned long long *reasons) {
    return get_reasons(begin(device), "nvmlDeviceGetCurrentClocksThrottleReasons", reasons);
}

EXPORT int nvmlDeviceGetCurrentClocksEventReasons(Device device, unsigned long long *reasons) {
    struct Call call = begin(device);
    if (call.result == SUCCESS && node->faults[NODE_OLD_DRIVER]) call.result = FUNCTION_NOT_FOUND;
    return get_reasons(call, "nvmlDeviceGetCurrentClocksEventReasons", reasons);
}

static uint64_t last_refresh_ns(const struct Gpu *gpu, uint64_t now_ns) {
    uint64_t since_phase_ns = now_ns - gpu->refresh_phase_ns;
    return gpu->refresh_phase_ns + since_phase_ns / node->refresh_ns * node->refresh_ns;
}

static uint64_t energy_at_uj(const struct Segment *segment, uint64_t time_ns) {
    return segment->energy_uj + (time_ns - segment->since_ns) / 1000 * segment->power_mw / 1000;
}

static uint64_t shown_uj(const struct Gpu *gpu, uint64_t now_ns) {
    const struct Segment *segment = segment_of(gpu);
    uint64_t refresh_ns = last_refresh_ns(gpu, now_ns);
    if (gpu->faults[FAULT_COUNTER_STANDS] || refresh_ns <= segment->since_ns) return segment->shown_uj;
    return energy_at_uj(segment, refresh_ns);
}

EXPORT int nvmlDeviceGetTotalEnergyConsumption(Device device, unsigned long long *energy_mj) {
    struct Call call = begin(device);
    if (call.result == SUCCESS && call.gpu->faults[FAULT_NO_ENERGY]) call.result = NOT_SUPPORTED;
    if (call.result == SUCCESS) *energy_mj = shown_uj(call.gpu, call.now_ns) / 1000;
    return told(call, "nvmlDeviceGetTotalEnergyConsumption");
}

EXPORT int nvmlDeviceGetPowerUsage(Device device, unsigned *power_mw) {
    struct Call call = begin(device);
    if (call.result == SUCCESS) *power_mw = (unsigned)segment_of(call.gpu)->power_mw;
    return told(call, "nvmlDeviceGetPowerUsage");
}

struct FieldValue {
    uint32_t field, scope;
    int64_t timestamp_us, latency_us;
    uint32_t value_type, result;
    union {
        double real;
        unsigned whole;
        unsigned long long longest;
    } value;
};

EXPORT int nvmlDeviceGetFieldValues(Device device, int count, struct FieldValue *values) {
    struct Call call = begin(device);
    for (int i = 0; i < count && call.result == SUCCESS; i++) {
        int power = values[i].field == 185 || values[i].field == 186; /* average, instant */
        values[i].result = NOT_SUPPORTED;
        if (power && !call.gpu->faults[FAULT_NO_INSTANT_POWER]) {
            values[i].result = SUCCESS;
            values[i].value_type = 1;
            values[i].timestamp_us = (int64_t)(call.now_ns / 1000);
            values[i].value.whole = (unsigned)segment_of(call.gpu)->power_mw;
        }
    }
    record("nvmlDeviceGetFieldValues", call.gpu, call.result, "%u", count ? values[0].field : 0);
    return end(call);
}

EXPORT int nvmlDeviceGetEnforcedPowerLimit(Device device, unsigned *limit_mw) {
    struct Call call = begin(device);
    if (call.result == SUCCESS) {
        uint64_t set_w = call.gpu->faults[FAULT_POWER_LIMIT_W];
        *limit_mw = (unsigned)(set_w ? 1000 * set_w : call.gpu->power_limit_mw);
    }
    return told(call, "nvmlDeviceGetEnforcedPowerLimit");
}

EXPORT int nvmlDeviceGetPowerManagementDefaultLimit(Device device, unsigned *limit_mw) {
    struct Call call = begin(device);
    if (call.result == SUCCESS) *limit_mw = (unsigned)call.gpu->power_limit_mw;
    return told(call, "nvmlDeviceGetPowerManagementDefaultLimit");
}

struct CurrentProfiles {
    unsigned version, valid[8], requested[8], enforced[8];
};

static void set_mask(unsigned mask[8], uint64_t bits) {
    for (int word = 0; word < 8; word++)
        mask[word] = word < 2 ? (unsigned)(bits >> 32 * word) : 0;
}

EXPORT int nvmlDeviceWorkloadPowerProfileGetCurrentProfiles(Device device,
                                                            struct CurrentProfiles *current) {
    struct Call call = begin(device);
    if (call.result == SUCCESS && node->faults[NODE_OLD_DRIVER])
        call.result = FUNCTION_NOT_FOUND;
    else if (call.result == SUCCESS && !call.gpu->has_profiles)
        call.result = NOT_SUPPORTED;
    else if (call.result == SUCCESS && current->version != (1u << 24 | sizeof *current))
        call.result = ARGUMENT_VERSION_MISMATCH;
    if (call.result == SUCCESS) {
        set_mask(current->valid, (1u << 25) - 1);
        set_mask(current->requested, call.gpu->faults[FAULT_REQUESTED_PROFILES]);
        set_mask(current->enforced, call.gpu->faults[FAULT_ENFORCED_PROFILES]);
    }
    return told(call, "nvmlDeviceWorkloadPowerProfileGetCurrentProfiles");
}

static void change_lock(struct Call call, uint64_t low_mhz, uint64_t high_mhz) {
    struct Gpu *gpu = call.gpu;
    struct Segment *next = &gpu->segments[~gpu->active & 1];
    next->low_mhz = low_mhz;
    next->high_mhz = high_mhz;
    next->since_ns = call.now_ns;
    next->energy_uj = energy_at_uj(segment_of(gpu), call.now_ns);
    next->shown_uj = shown_uj(gpu, call.now_ns);
    next->power_mw = gpu->static_mw + gpu->mw_per_mhz * observed_mhz(gpu, high_mhz);
    __atomic_store_n(&gpu->active, ~gpu->active & 1, __ATOMIC_SEQ_CST);
}

EXPORT int nvmlDeviceSetGpuLockedClocks(Device device, unsigned low_mhz, unsigned high_mhz) {
    struct Call call = begin(device);
    if (call.result == SUCCESS) call.result = changing_fault(call.gpu);
    if (call.result == SUCCESS && (low_mhz > high_mhz || !high_mhz)) call.result = INVALID_ARGUMENT;
    record("nvmlDeviceSetGpuLockedClocks", call.gpu, call.result, "%u,%u", low_mhz, high_mhz);
    if (call.result == SUCCESS) {
        uint64_t top_mhz = call.gpu->graphics_mhz[0][0];
        change_lock(call, low_mhz, high_mhz < top_mhz ? high_mhz : top_mhz);
    }
    return end(call);
}

EXPORT int nvmlDeviceResetGpuLockedClocks(Device device) {
    struct Call call = begin(device);
    if (call.result == SUCCESS) call.result = changing_fault(call.gpu);
    record("nvmlDeviceResetGpuLockedClocks", call.gpu, call.result, "");
    if (call.result == SUCCESS) change_lock(call, 0, 0);
    return end(call);
}
