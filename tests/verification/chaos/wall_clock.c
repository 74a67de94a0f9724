/* Loaded before the C library (LD_PRELOAD): the wall clock as it would be had somebody set it. How far it is off, in
   nanoseconds, stands in the file that COTENANT_CHAOS_CLOCK names, and is read each time. Clocks that count from a
   start, and the kernel's own timers, are left as they are. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile const int64_t *off;
static int (*real_clock_gettime)(clockid_t, struct timespec *);

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("COTENANT_CHAOS_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    real_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    if (file < 0) return;
    void *page = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    if (page != MAP_FAILED) off = page;
    close(file);
}

int clock_gettime(clockid_t clock, struct timespec *told) {
    if (!real_clock_gettime) real_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real_clock_gettime(clock, told);
    if (failed || !off || (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE)) return failed;
    int64_t seconds = *off / 1000000000, rest = told->tv_nsec + *off % 1000000000;
    if (rest < 0) { rest += 1000000000; seconds -= 1; }
    if (rest >= 1000000000) { rest -= 1000000000; seconds += 1; }
    told->tv_sec += seconds;
    told->tv_nsec = rest;
    return 0;
}

int gettimeofday(struct timeval *told, void *zone) {
    (void)zone;
    struct timespec now;
    int failed = clock_gettime(CLOCK_REALTIME, &now);
    if (!failed) { told->tv_sec = now.tv_sec; told->tv_usec = now.tv_nsec / 1000; }
    return failed;
}

time_t time(time_t *told) {
    struct timespec now;
    if (clock_gettime(CLOCK_REALTIME, &now)) return (time_t)-1;
    if (told) *told = now.tv_sec;
    return now.tv_sec;
}
