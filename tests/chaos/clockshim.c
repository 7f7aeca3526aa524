/* Loaded into a node (LD_PRELOAD): its wall clock is off by as much, and its disk as slow, as a page of memory says
   that the harness writes and this reads. The clock that never jumps is left alone, as a jump of the real one leaves it. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

struct page {
    volatile int64_t clock_ns; /* added to the wall clock */
    volatile int64_t sync_us;  /* each fsync takes so much longer */
    volatile int64_t write_us; /* and each write to a file */
};

static struct page nothing;
static struct page *page = &nothing;

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) real = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

__attribute__((constructor)) static void open_page(void) {
    const char *path = getenv("ECHO_CHAOS_PAGE");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *at = mmap(0, 4096, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (at != MAP_FAILED) page = at;
}

static void shift(int64_t *seconds, int64_t *parts, int64_t of) {
    int64_t off = page->clock_ns / (1000000000 / of);
    *seconds += off / of;
    *parts += off % of;
    if (*parts < 0) { *parts += of; --*seconds; }
    if (*parts >= of) { *parts -= of; ++*seconds; }
}

int clock_gettime(clockid_t which, struct timespec *told) {
    REAL(int, "clock_gettime", clockid_t, struct timespec *);
    int failed = real(which, told);
    if (!failed && page->clock_ns && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE)) {
        int64_t seconds = told->tv_sec, parts = told->tv_nsec;
        shift(&seconds, &parts, 1000000000);
        told->tv_sec = seconds;
        told->tv_nsec = parts;
    }
    return failed;
}

int gettimeofday(struct timeval *told, void *zone) {
    REAL(int, "gettimeofday", struct timeval *, void *);
    int failed = real(told, zone);
    if (!failed && page->clock_ns) {
        int64_t seconds = told->tv_sec, parts = told->tv_usec;
        shift(&seconds, &parts, 1000000);
        told->tv_sec = seconds;
        told->tv_usec = parts;
    }
    return failed;
}

time_t time(time_t *told) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (told) *told = now.tv_sec;
    return now.tv_sec;
}

static void dally(int64_t us) {
    struct timespec left = {us / 1000000, us % 1000000 * 1000};
    if (us > 0) nanosleep(&left, 0);
}

static void dally_at(int file) {
    struct stat about;
    if (page->write_us && !fstat(file, &about) && S_ISREG(about.st_mode)) dally(page->write_us);
}

int fsync(int file) {
    REAL(int, "fsync", int);
    dally(page->sync_us);
    return real(file);
}

int fdatasync(int file) {
    REAL(int, "fdatasync", int);
    dally(page->sync_us);
    return real(file);
}

ssize_t write(int file, const void *data, size_t size) {
    REAL(ssize_t, "write", int, const void *, size_t);
    dally_at(file);
    return real(file, data, size);
}

ssize_t pwrite(int file, const void *data, size_t size, off_t at) {
    REAL(ssize_t, "pwrite", int, const void *, size_t, off_t);
    dally_at(file);
    return real(file, data, size, at);
}

ssize_t pwrite64(int file, const void *data, size_t size, off64_t at) {
    REAL(ssize_t, "pwrite64", int, const void *, size_t, off64_t);
    dally_at(file);
    return real(file, data, size, at);
}
