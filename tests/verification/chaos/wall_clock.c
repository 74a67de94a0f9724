/* Preloaded before the C library (LD_PRELOAD): shifts the wall clock. The offset in nanoseconds is read on every call
   from the file named by COTENANT_CHAOS_CLOCK. Monotonic clocks and the kernel's own timers are unchanged. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile const int64_t *offset;
static int (*real_clock_gettime)(clockid_t, struct timespec *);

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("COTENANT_CHAOS_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    real_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    if (file < 0) return;
    void *page = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    if (page != MAP_FAILED) offset = page;
    close(file);
}

int clock_gettime(clockid_t clock, struct timespec *result) {
    if (!real_clock_gettime) real_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real_clock_gettime(clock, result);
    if (failed || !offset || (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE)) return failed;
    int64_t seconds = *offset / 1000000000, rest = result->tv_nsec + *offset % 1000000000;
    if (rest < 0) { rest += 1000000000; seconds -= 1; }
    if (rest >= 1000000000) { rest -= 1000000000; seconds += 1; }
    result->tv_sec += seconds;
    result->tv_nsec = rest;
    return 0;
}

int gettimeofday(struct timeval *result, void *zone) {
    (void)zone;
    struct timespec now;
    int failed = clock_gettime(CLOCK_REALTIME, &now);
    if (!failed) { result->tv_sec = now.tv_sec; result->tv_usec = now.tv_nsec / 1000; }
    return failed;
}

time_t time(time_t *result) {
    struct timespec now;
    if (clock_gettime(CLOCK_REALTIME, &now)) return (time_t)-1;
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}
