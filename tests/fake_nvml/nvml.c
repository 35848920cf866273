/* A libnvidia-ml.so.1 whose GPUs live in a folder that processes share.
 *
 * The folder (FAKE_NVML_FOLDER) holds two files. `state` is one struct Node, mapped by every
 * process and by fake_nvml.py. `history` gets one line a call, by one write, so lines stay whole.
 *
 * Every call holds an flock on `state`, which the kernel drops when a process is killed. A process
 * may be killed between any two instructions, so a change is prepared in the segment that is not
 * in force and takes effect by one aligned store (`active`). Its history line is written before
 * that: a change is never in force without being in the history.
 */

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define MAX_GPUS 16
#define MAX_MEMORY_CLOCKS 4
#define MAX_GRAPHICS_CLOCKS 256

/* Results, numbered as NVML numbers them. */
enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NO_PERMISSION = 4,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    TIMEOUT = 10,
    FUNCTION_NOT_FOUND = 13,
    GPU_IS_LOST = 15,
    LIB_RM_VERSION_MISMATCH = 18,
    UNKNOWN = 999,
};

/* Faults of one GPU, in the order of fake_nvml.py. 0 is none. */
enum {
    FAULT_NO_PERMISSION,
    FAULT_LOST,
    FAULT_SLOW_MS,
    FAULT_TIMEOUT,
    FAULT_NOT_SUPPORTED,
    FAULT_NO_ENERGY,
    FAULT_NO_INSTANT_POWER,
    FAULT_MIG,
    FAULT_VGPU,
    FAULT_CLOCK_CAP_MHZ,
    FAULT_STALLED_MJ, /* one more than what the counter shows for ever */
    FAULT_ENERGY_BACK_MJ,
    FAULT_THROTTLE_REASONS,
    FAULT_CALLS_LEFT, /* one more than the calls that still work */
    NUM_FAULTS = 16,
};

/* Faults of the whole node. */
enum {
    NODE_DRIVER_MISMATCH,
    NODE_DRIVER_NOT_LOADED,
    NODE_OLD_DRIVER, /* has no event reasons, only throttle reasons */
    NUM_NODE_FAULTS = 8,
};

/* What has been true of a GPU since an instant. */
struct Segment {
    uint64_t low_mhz, high_mhz; /* the lock; 0 and 0 without one */
    uint64_t since_ns;
    uint64_t energy_uj; /* at since_ns */
    uint64_t shown_uj;  /* what the counter showed at since_ns: the energy at its last refresh */
    uint64_t power_mw;
};

struct Gpu {
    char uuid[96], name[96], bus_id[32];
    uint64_t num_memory, memory_mhz[MAX_MEMORY_CLOCKS];
    uint64_t num_graphics[MAX_MEMORY_CLOCKS];
    uint64_t graphics_mhz[MAX_MEMORY_CLOCKS][MAX_GRAPHICS_CLOCKS];
    uint64_t current_memory_mhz, power_limit_mw, static_mw, mw_per_mhz;
    uint64_t mig_capable, refresh_phase_ns;
    uint64_t faults[NUM_FAULTS];
    uint64_t active;
    struct Segment segments[2];
};

struct Node {
    uint64_t bytes, num_gpus, refresh_ns;
    uint64_t faults[NUM_NODE_FAULTS];
    char driver_version[80];
    struct Gpu gpus[MAX_GPUS];
};

typedef void *Device;

struct Call {
    struct Gpu *gpu;
    int result;
    uint64_t now_ns;
    int locked;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static char handles[MAX_GPUS]; /* a handle is the address of one of these */
static char folder[4096];
static struct Node *node;
static int node_fd = -1, history_fd = -1, inits;

EXPORT uint64_t fakeNvmlNodeBytes(void) { return sizeof(struct Node); }

static uint64_t monotonic_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void forget(void) {
    if (node) munmap(node, sizeof *node);
    if (node_fd >= 0) close(node_fd);
    if (history_fd >= 0) close(history_fd);
    node = NULL;
    node_fd = history_fd = -1;
    inits = 0;
}

/* A forked child shares the parent's open files, so its flock would not exclude the parent, and a
 * thread of the parent may have held the mutex. It starts uninitialised. */
static void after_fork(void) {
    pthread_mutex_init(&mutex, NULL);
    forget();
}

__attribute__((constructor)) static void load(void) { pthread_atfork(NULL, NULL, after_fork); }

/* Another folder for this process (NULL: that of the environment), uninitialised. */
EXPORT void fakeNvmlUse(const char *path) {
    pthread_mutex_lock(&mutex);
    forget();
    snprintf(folder, sizeof folder, "%s", path ? path : "");
    pthread_mutex_unlock(&mutex);
}

static int open_node(void) {
    char path[4200];
    const char *chosen = folder[0] ? folder : getenv("FAKE_NVML_FOLDER");
    if (!chosen || !chosen[0]) return DRIVER_NOT_LOADED;
    snprintf(path, sizeof path, "%s/state", chosen);
    node_fd = open(path, O_RDWR | O_CLOEXEC);
    snprintf(path, sizeof path, "%s/history", chosen);
    history_fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (node_fd < 0 || history_fd < 0) return DRIVER_NOT_LOADED;
    node = mmap(NULL, sizeof *node, PROT_READ | PROT_WRITE, MAP_SHARED, node_fd, 0);
    if (node == MAP_FAILED) {
        node = NULL;
        return DRIVER_NOT_LOADED;
    }
    if (node->bytes != sizeof *node) return LIB_RM_VERSION_MISMATCH;
    return SUCCESS;
}

static void flock_node(int operation) {
    while (flock(node_fd, operation) != 0 && errno == EINTR) {
    }
}

static void record(const char *function, const struct Gpu *gpu, int result, const char *format,
                   ...) {
    char line[512], arguments[256];
    va_list values;
    va_start(values, format);
    vsnprintf(arguments, sizeof arguments, format, values);
    va_end(values);
    int length = snprintf(line, sizeof line, "%llu\t%d\t%s\t%s\t%s\t%d\n",
                          (unsigned long long)monotonic_ns(), (int)getpid(), function,
                          gpu ? gpu->uuid : "", arguments, result);
    if (history_fd >= 0 && write(history_fd, line, (size_t)length) != length) abort();
}

static struct Gpu *gpu_of(Device device) {
    char *handle = device;
    if (!node || handle < handles || handle >= handles + node->num_gpus) return NULL;
    return &node->gpus[handle - handles];
}

/* What makes any call on a GPU fail. */
static int common_fault(struct Gpu *gpu) {
    if (gpu->faults[FAULT_LOST]) return GPU_IS_LOST;
    if (gpu->faults[FAULT_CALLS_LEFT]) {
        if (gpu->faults[FAULT_CALLS_LEFT] == 1) return UNKNOWN;
        gpu->faults[FAULT_CALLS_LEFT]--;
    }
    return SUCCESS;
}

static int changing_fault(const struct Gpu *gpu) {
    const uint64_t *faults = gpu->faults;
    if (faults[FAULT_NOT_SUPPORTED] || faults[FAULT_MIG] || faults[FAULT_VGPU])
        return NOT_SUPPORTED;
    if (faults[FAULT_NO_PERMISSION]) return NO_PERMISSION;
    if (faults[FAULT_TIMEOUT]) return TIMEOUT;
    return SUCCESS;
}

static void sleep_ms(uint64_t milliseconds) {
    struct timespec left = {(time_t)(milliseconds / 1000), (long)(milliseconds % 1000) * 1000000};
    while (nanosleep(&left, &left) != 0 && errno == EINTR) {
    }
}

static struct Call begin_node(void) {
    struct Call call = {NULL, SUCCESS, 0, 0};
    pthread_mutex_lock(&mutex);
    if (!inits) {
        call.result = UNINITIALIZED;
        return call;
    }
    flock_node(LOCK_EX);
    call.locked = 1;
    call.now_ns = monotonic_ns();
    return call;
}

static struct Call begin(Device device) {
    /* A slow GPU must not hold up the others, so it is slow before anything is locked. */
    pthread_mutex_lock(&mutex);
    struct Gpu *slow = inits ? gpu_of(device) : NULL;
    uint64_t slow_ms = slow ? slow->faults[FAULT_SLOW_MS] : 0;
    pthread_mutex_unlock(&mutex);
    if (slow_ms) sleep_ms(slow_ms);
    struct Call call = begin_node();
    if (call.result == SUCCESS) {
        call.gpu = gpu_of(device);
        call.result = call.gpu ? common_fault(call.gpu) : INVALID_ARGUMENT;
    }
    return call;
}

static int end(struct Call call) {
    if (call.locked) flock_node(LOCK_UN);
    pthread_mutex_unlock(&mutex);
    return call.result;
}

static int told(struct Call call, const char *function) {
    record(function, call.gpu, call.result, "");
    return end(call);
}

/* ---- the library ---- */

static int init(const char *function) {
    pthread_mutex_lock(&mutex);
    int result = SUCCESS;
    if (!inits) {
        result = open_node();
        if (result == SUCCESS && node->faults[NODE_DRIVER_MISMATCH])
            result = LIB_RM_VERSION_MISMATCH;
        if (result == SUCCESS && node->faults[NODE_DRIVER_NOT_LOADED]) result = DRIVER_NOT_LOADED;
    }
    record(function, NULL, result, "");
    if (result == SUCCESS)
        inits++;
    else
        forget();
    pthread_mutex_unlock(&mutex);
    return result;
}

EXPORT int nvmlInit_v2(void) { return init("nvmlInit_v2"); }
EXPORT int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    return init("nvmlInitWithFlags");
}

EXPORT int nvmlShutdown(void) {
    pthread_mutex_lock(&mutex);
    int result = inits ? SUCCESS : UNINITIALIZED;
    record("nvmlShutdown", NULL, result, "");
    if (inits && --inits == 0) forget();
    pthread_mutex_unlock(&mutex);
    return result;
}

EXPORT const char *nvmlErrorString(int result) {
    switch (result) {
        case SUCCESS: return "Success";
        case UNINITIALIZED: return "Uninitialized";
        case INVALID_ARGUMENT: return "Invalid Argument";
        case NOT_SUPPORTED: return "Not Supported";
        case NO_PERMISSION: return "Insufficient Permissions";
        case NOT_FOUND: return "Not Found";
        case INSUFFICIENT_SIZE: return "Insufficient Size";
        case DRIVER_NOT_LOADED: return "Driver Not Loaded";
        case TIMEOUT: return "Timeout";
        case FUNCTION_NOT_FOUND: return "Function Not Found";
        case GPU_IS_LOST: return "GPU is lost";
        case LIB_RM_VERSION_MISMATCH: return "Driver/library version mismatch";
        default: return "Unknown Error";
    }
}

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

EXPORT int nvmlSystemGetNVMLVersion(char *version, unsigned size) {
    struct Call call = begin_node();
    if (call.result == SUCCESS) call.result = copy_text(version, size, "12.fake");
    return told(call, "nvmlSystemGetNVMLVersion");
}

EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = 12080;
    return told(begin_node(), "nvmlSystemGetCudaDriverVersion_v2");
}

EXPORT int nvmlDeviceGetCount_v2(unsigned *count) {
    struct Call call = begin_node();
    if (call.result == SUCCESS) *count = (unsigned)node->num_gpus;
    return told(call, "nvmlDeviceGetCount_v2");
}

/* ---- finding a GPU ---- */

static int found(struct Call call, const char *function, uint64_t index, Device *device) {
    if (call.result == SUCCESS) {
        if (index < node->num_gpus) {
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
    if (call.result == SUCCESS && index >= node->num_gpus) {
        call.result = INVALID_ARGUMENT;
        return told(call, "nvmlDeviceGetHandleByIndex_v2");
    }
    return found(call, "nvmlDeviceGetHandleByIndex_v2", index, device);
}

EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, Device *device) {
    struct Call call = begin_node();
    uint64_t index = 0;
    if (call.result == SUCCESS)
        while (index < node->num_gpus && strcmp(node->gpus[index].uuid, uuid) != 0) index++;
    return found(call, "nvmlDeviceGetHandleByUUID", index, device);
}

static int parse_bus_id(const char *text, unsigned parts[4]) {
    parts[3] = 0;
    return sscanf(text, "%x:%x:%x.%x", &parts[0], &parts[1], &parts[2], &parts[3]) >= 3;
}

EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, Device *device) {
    struct Call call = begin_node();
    uint64_t index = 0;
    unsigned wanted[4], own[4];
    if (call.result == SUCCESS) {
        if (!parse_bus_id(bus_id, wanted)) {
            call.result = INVALID_ARGUMENT;
            return told(call, "nvmlDeviceGetHandleByPciBusId_v2");
        }
        for (; index < node->num_gpus; index++)
            if (parse_bus_id(node->gpus[index].bus_id, own) && !memcmp(own, wanted, sizeof own))
                break;
    }
    return found(call, "nvmlDeviceGetHandleByPciBusId_v2", index, device);
}

EXPORT int nvmlDeviceGetUUID(Device device, char *uuid, unsigned size) {
    struct Call call = begin(device);
    if (call.result == SUCCESS) call.result = copy_text(uuid, size, call.gpu->uuid);
    return told(call, "nvmlDeviceGetUUID");
}

EXPORT int nvmlDeviceGetName(Device device, char *name, unsigned size) {
    struct Call call = begin(device);
    if (call.result == SUCCESS) call.result = copy_text(name, size, call.gpu->name);
    return told(call, "nvmlDeviceGetName");
}

EXPORT int nvmlDeviceGetIndex(Device device, unsigned *index) {
    struct Call call = begin(device);
    if (call.result == SUCCESS) *index = (unsigned)(call.gpu - node->gpus);
    return told(call, "nvmlDeviceGetIndex");
}

struct PciInfo {
    char legacy_bus_id[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
};

EXPORT int nvmlDeviceGetPciInfo_v3(Device device, struct PciInfo *info) {
    struct Call call = begin(device);
    unsigned parts[4];
    if (call.result == SUCCESS && parse_bus_id(call.gpu->bus_id, parts)) {
        memset(info, 0, sizeof *info);
        info->domain = parts[0];
        info->bus = parts[1];
        info->device = parts[2];
        snprintf(info->legacy_bus_id, sizeof info->legacy_bus_id, "%04X:%02X:%02X.0",
                 parts[0] & 0xffff, parts[1] & 0xff, parts[2] & 0xff);
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

EXPORT int nvmlDeviceGetPersistenceMode(Device device, unsigned *mode) {
    struct Call call = begin(device);
    if (call.result == SUCCESS) *mode = 1;
    return told(call, "nvmlDeviceGetPersistenceMode");
}

/* ---- clocks ---- */

static const struct Segment *segment_of(const struct Gpu *gpu) {
    return &gpu->segments[gpu->active & 1];
}

static uint64_t observed_mhz(const struct Gpu *gpu, uint64_t high_mhz) {
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

static int get_clock(struct Call call, const char *function, unsigned type, unsigned *mhz) {
    if (call.result == SUCCESS) {
        const struct Gpu *gpu = call.gpu;
        if (type <= 1 || type == 3)
            *mhz = (unsigned)observed_mhz(gpu, segment_of(gpu)->high_mhz);
        else if (type == 2)
            *mhz = (unsigned)gpu->current_memory_mhz;
        else
            call.result = INVALID_ARGUMENT;
    }
    record(function, call.gpu, call.result, "%u", type);
    return end(call);
}

EXPORT int nvmlDeviceGetClockInfo(Device device, unsigned type, unsigned *mhz) {
    return get_clock(begin(device), "nvmlDeviceGetClockInfo", type, mhz);
}

EXPORT int nvmlDeviceGetClock(Device device, unsigned type, unsigned id, unsigned *mhz) {
    struct Call call = begin(device);
    if (call.result == SUCCESS && id != 0) call.result = NOT_SUPPORTED;
    return get_clock(call, "nvmlDeviceGetClock", type, mhz);
}

EXPORT int nvmlDeviceGetMaxClockInfo(Device device, unsigned type, unsigned *mhz) {
    struct Call call = begin(device);
    if (call.result == SUCCESS)
        *mhz = (unsigned)(type == 2 ? call.gpu->memory_mhz[0] : call.gpu->graphics_mhz[0][0]);
    return told(call, "nvmlDeviceGetMaxClockInfo");
}

static int get_reasons(struct Call call, const char *function, unsigned long long *reasons) {
    if (call.result == SUCCESS) {
        const struct Gpu *gpu = call.gpu;
        uint64_t high_mhz = segment_of(gpu)->high_mhz;
        uint64_t wanted_mhz = high_mhz ? high_mhz : gpu->graphics_mhz[0][0];
        *reasons = gpu->faults[FAULT_THROTTLE_REASONS];
        if (observed_mhz(gpu, high_mhz) < wanted_mhz && !*reasons) *reasons = 4; /* power cap */
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

/* ---- meters ---- */

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
    if (refresh_ns <= segment->since_ns) return segment->shown_uj;
    return energy_at_uj(segment, refresh_ns);
}

EXPORT int nvmlDeviceGetTotalEnergyConsumption(Device device, unsigned long long *energy_mj) {
    struct Call call = begin(device);
    if (call.result == SUCCESS && call.gpu->faults[FAULT_NO_ENERGY]) call.result = NOT_SUPPORTED;
    if (call.result == SUCCESS) {
        uint64_t stalled_mj = call.gpu->faults[FAULT_STALLED_MJ];
        *energy_mj = stalled_mj ? stalled_mj - 1 : shown_uj(call.gpu, call.now_ns) / 1000;
        *energy_mj -= call.gpu->faults[FAULT_ENERGY_BACK_MJ];
    }
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

static int get_limit(Device device, const char *function, unsigned *limit_mw) {
    struct Call call = begin(device);
    if (call.result == SUCCESS) *limit_mw = (unsigned)call.gpu->power_limit_mw;
    return told(call, function);
}

EXPORT int nvmlDeviceGetEnforcedPowerLimit(Device device, unsigned *limit_mw) {
    return get_limit(device, "nvmlDeviceGetEnforcedPowerLimit", limit_mw);
}

EXPORT int nvmlDeviceGetPowerManagementLimit(Device device, unsigned *limit_mw) {
    return get_limit(device, "nvmlDeviceGetPowerManagementLimit", limit_mw);
}

EXPORT int nvmlDeviceGetPowerManagementDefaultLimit(Device device, unsigned *limit_mw) {
    return get_limit(device, "nvmlDeviceGetPowerManagementDefaultLimit", limit_mw);
}

/* ---- locked clocks, which outlive the process ---- */

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

/* ---- everything else that changes a GPU: remembered, and without effect ---- */

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
