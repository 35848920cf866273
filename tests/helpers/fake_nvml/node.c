/* The node's files, its faults, and what every call goes through. */

#include "node.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
char handles[MAX_GPUS];
static char folder[4096];
struct Node *node;
static int node_fd = -1, history_fd = -1, inits;

EXPORT uint64_t fakeNvmlNodeBytes(void) { return sizeof(struct Node); }

uint64_t monotonic_ns(void) {
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

/* A process that is killed in the write may leave the start of a line: the next one begins on its
 * own, and only a line with its full stop counts. */
void record(const char *function, const struct Gpu *gpu, int result, const char *format, ...) {
    char line[512], arguments[256];
    va_list values;
    va_start(values, format);
    vsnprintf(arguments, sizeof arguments, format, values);
    va_end(values);
    int length = snprintf(line, sizeof line, "\n%llu\t%d\t%s\t%s\t%s\t%d\t.\n",
                          (unsigned long long)monotonic_ns(), (int)getpid(), function,
                          gpu ? gpu->uuid : "", arguments, result);
    if (history_fd >= 0 && write(history_fd, line, (size_t)length) != length) abort();
}

struct Gpu *gpu_of(Device device) {
    char *handle = device;
    if (!node || handle < handles || handle >= handles + node->num_gpus) return NULL;
    return &node->gpus[handle - handles];
}

uint64_t listed_before(const struct Gpu *end) {
    uint64_t listed = 0;
    for (const struct Gpu *gpu = node->gpus; gpu < end; gpu++) listed += !gpu->faults[FAULT_GONE];
    return listed;
}

int common_fault(struct Gpu *gpu) {
    if (gpu->faults[FAULT_LOST] || gpu->faults[FAULT_GONE]) return GPU_IS_LOST;
    if (gpu->faults[FAULT_CALLS_LEFT]) {
        if (gpu->faults[FAULT_CALLS_LEFT] == 1) return UNKNOWN;
        gpu->faults[FAULT_CALLS_LEFT]--;
    }
    return SUCCESS;
}

int changing_fault(const struct Gpu *gpu) {
    const uint64_t *faults = gpu->faults;
    if (faults[FAULT_NOT_SUPPORTED] || faults[FAULT_MIG] || faults[FAULT_VGPU])
        return NOT_SUPPORTED;
    if (faults[FAULT_NO_PERMISSION]) return NO_PERMISSION;
    if (faults[FAULT_TIMEOUT]) return TIMEOUT;
    if (faults[FAULT_IN_USE]) return IN_USE;
    return SUCCESS;
}

static void sleep_ms(uint64_t milliseconds) {
    struct timespec left = {(time_t)(milliseconds / 1000), (long)(milliseconds % 1000) * 1000000};
    while (nanosleep(&left, &left) != 0 && errno == EINTR) {
    }
}

struct Call begin_node(void) {
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

struct Call begin(Device device) {
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

int end(struct Call call) {
    if (call.locked) flock_node(LOCK_UN);
    pthread_mutex_unlock(&mutex);
    return call.result;
}

int told(struct Call call, const char *function) {
    record(function, call.gpu, call.result, "");
    return end(call);
}

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
