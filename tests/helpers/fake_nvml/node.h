/* A libnvidia-ml.so.1 whose GPUs live in a folder that processes share.
 *
 * The folder (FAKE_NVML_FOLDER) holds two files. `state` is one struct Node, mapped by every
 * process and by fake_nvml.py. `history` gets one line a call, by one write.
 *
 * Every call holds an flock on `state`, which the kernel drops when a process is killed. A process
 * may be killed between any two instructions, so a change is prepared in the segment that is not
 * in force and takes effect by one aligned store (`active`). Its history line is written before
 * that: a change is never in force without being in the history.
 */

#ifndef NODE_H
#define NODE_H

#include <stdint.h>

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
    IN_USE = 19,
    ARGUMENT_VERSION_MISMATCH = 25,
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
    FAULT_THROTTLE_REASONS,
    FAULT_CALLS_LEFT, /* one more than the calls that still work */
    FAULT_REQUESTED_PROFILES, /* bits of workload power profiles, where the GPU has them */
    FAULT_ENFORCED_PROFILES,
    FAULT_POWER_LIMIT_W, /* what the limit is now, in place of the default */
    FAULT_PROCESS,    /* a process that computes there, by its number */
    FAULT_BUSY_PERCENT,
    FAULT_TEMPERATURE_C, /* one of 0 cannot be read */
    FAULT_GONE,         /* the driver does not list it, as after a boot that it missed */
    FAULT_COUNTER_STANDS,
    FAULT_IN_USE,
    FAULT_HELD_MHZ,     /* the clock, whatever was locked; no reason is shown */
    NUM_FAULTS = 24,
};

/* Faults of the whole node. */
enum {
    NODE_DRIVER_MISMATCH,
    NODE_DRIVER_NOT_LOADED,
    NODE_OLD_DRIVER, /* knows neither power profiles nor the new name of throttle reasons */
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
    uint64_t mig_capable, has_profiles, refresh_phase_ns;
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

extern struct Node *node;      /* NULL while uninitialised */
extern char handles[MAX_GPUS]; /* a handle is the address of one of these */

struct Gpu *gpu_of(Device device);
uint64_t listed_before(const struct Gpu *end); /* how many GPUs that are not gone */

/* Each call of the library is begun, recorded once and ended. `begin` is slow where the GPU is. */
struct Call begin_node(void);
struct Call begin(Device device);
void record(const char *function, const struct Gpu *gpu, int result, const char *format, ...);
int end(struct Call call);
int told(struct Call call, const char *function); /* recorded without arguments, and ended */

int common_fault(struct Gpu *gpu);         /* what makes any call on a GPU fail */
int changing_fault(const struct Gpu *gpu); /* what makes a call fail that changes it */

#endif
