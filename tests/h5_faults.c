/* Makes the n-th call that changes a file under a folder fail, in C as in Python: for HDF5's writes (LD_PRELOAD).

   cc -shared -fPIC -o h5_faults.so h5_faults.c -ldl
   fault_arm(folder, n, errno, lasts)   the n-th such call fails, all after it too where `lasts`; errno 0: writes half
   fault_count()                        how many calls there were since; negative: none has met the fault yet */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static char under[PATH_MAX];
static int at, error, lasts, count, met;

void fault_arm(const char *folder, int n, int number, int all)
{
    snprintf(under, sizeof under, "%s", folder);
    at = n, error = number, lasts = all, count = 0, met = 0;
}

int fault_count(void) { return met ? count : -count; }

static int meets(int fd)
{
    char link[64], path[PATH_MAX];
    if (!at)
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0)
        return 0;
    path[size] = 0;
    if (strncmp(path, under, strlen(under)))
        return 0;
    count++;
    int now = count == at || (lasts && count > at);
    met |= now;
    return now;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define FAIL(fd) do { if (meets(fd)) { errno = error; return -1; } } while (0)
/* A write either fails or (no errno) does half of what it should. */
#define WRITE(name, fd, size, ...)                  \
    do {                                            \
        if (meets(fd)) {                            \
            if (error) { errno = error; return -1; } \
            size = (size + 1) / 2;                  \
        }                                           \
        return REAL(name)(fd, __VA_ARGS__);         \
    } while (0)

ssize_t write(int fd, const void *data, size_t size) { WRITE(write, fd, size, data, size); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t place) { WRITE(pwrite, fd, size, data, size, place); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t place) { WRITE(pwrite64, fd, size, data, size, place); }
/* A short one does half of its first piece. */
#define WRITEV(name, fd, parts, number, place, ...)                                                    \
    do {                                                                                               \
        if (meets(fd)) {                                                                               \
            if (error) { errno = error; return -1; }                                                   \
            return REAL(pwrite)(fd, parts[0].iov_base, parts[0].iov_len - parts[0].iov_len / 2, place); \
        }                                                                                              \
        return REAL(name)(fd, parts, number, place __VA_ARGS__);                                       \
    } while (0)

ssize_t pwritev(int fd, const struct iovec *parts, int number, off_t place) { WRITEV(pwritev, fd, parts, number, place); }
ssize_t pwritev64(int fd, const struct iovec *parts, int number, off64_t place) { WRITEV(pwritev64, fd, parts, number, place); }
ssize_t pwritev2(int fd, const struct iovec *parts, int number, off_t place, int flags) { WRITEV(pwritev2, fd, parts, number, place, , flags); }
ssize_t pwritev64v2(int fd, const struct iovec *parts, int number, off64_t place, int flags) { WRITEV(pwritev64v2, fd, parts, number, place, , flags); }
int fsync(int fd) { if (error) FAIL(fd); return REAL(fsync)(fd); }
int fdatasync(int fd) { if (error) FAIL(fd); return REAL(fdatasync)(fd); }
int ftruncate(int fd, off_t size) { if (error) FAIL(fd); return REAL(ftruncate)(fd, size); }
int ftruncate64(int fd, off64_t size) { if (error) FAIL(fd); return REAL(ftruncate64)(fd, size); }
int close(int fd)
{
    int failed = error && meets(fd); /* as Linux does it: it may fail, and is closed all the same */
    int done = REAL(close)(fd);
    if (failed) { errno = error; return -1; }
    return done;
}
