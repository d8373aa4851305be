/* Preloaded into a process and those that it starts: from a chosen write on, the disk of one folder is full.
 *
 * The control block is a file that the tool maps as well (see full_disk.py). Every write to a file below the folder,
 * and every file or folder created there, counts; from number `first` on each fails with ENOSPC, until `count` of them
 * have failed. Inactive, it costs one comparison per call.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

struct control {
    int64_t active, writes, first, count, failed;
    char folder[4096];
};
static struct control *control;

__attribute__((constructor)) static void attach(void) {
    const char *path = getenv("FULL_DISK_CONTROL");
    int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *memory = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory != MAP_FAILED) control = memory;
    close(file);
}

static int fails(const char *path) {
    if (!control || !control->active) return 0;
    size_t length = strlen(control->folder);
    if (strncmp(path, control->folder, length)) return 0;
    int64_t number = __atomic_add_fetch(&control->writes, 1, __ATOMIC_SEQ_CST);
    if (!control->first || number < control->first) return 0;
    if (__atomic_add_fetch(&control->failed, 1, __ATOMIC_SEQ_CST) > control->count) return 0;
    errno = ENOSPC;
    return 1;
}

static int fails_at(int file) {
    if (!control || !control->active) return 0;
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    return fails(path);
}

static int fails_below(int folder, const char *name) {
    if (!control || !control->active) return 0;
    char link[64], path[8200];
    ssize_t length = 0;
    if (name[0] != '/') {
        if (folder == AT_FDCWD) snprintf(link, sizeof link, "/proc/self/cwd");
        else snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        length = readlink(link, path, 4095);
        if (length <= 0) return 0;
        path[length++] = '/';
    }
    strncpy(path + length, name, 4096);
    path[length + 4096] = 0;
    return fails(path);
}

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

ssize_t write(int file, const void *data, size_t size) {
    REAL(write);
    return fails_at(file) ? -1 : real(file, data, size);
}
ssize_t pwrite(int file, const void *data, size_t size, off_t at) {
    REAL(pwrite);
    return fails_at(file) ? -1 : real(file, data, size, at);
}
ssize_t pwrite64(int file, const void *data, size_t size, off64_t at) {
    REAL(pwrite64);
    return fails_at(file) ? -1 : real(file, data, size, at);
}
ssize_t writev(int file, const struct iovec *parts, int count) {
    REAL(writev);
    return fails_at(file) ? -1 : real(file, parts, count);
}
int fsync(int file) {
    REAL(fsync);
    return fails_at(file) ? -1 : real(file);
}
int mkdir(const char *path, mode_t mode) {
    REAL(mkdir);
    return fails_below(AT_FDCWD, path) ? -1 : real(path, mode);
}
#define OPENS(name, arguments, names, folder) \
    int name arguments { \
        mode_t mode = 0; \
        if (flags & (O_CREAT | __O_TMPFILE)) { \
            va_list more; \
            va_start(more, flags); \
            mode = va_arg(more, mode_t); \
            va_end(more); \
        } \
        REAL(name); \
        if ((flags & O_CREAT) && fails_below(folder, path)) return -1; \
        return real names; \
    }
OPENS(open, (const char *path, int flags, ...), (path, flags, mode), AT_FDCWD)
OPENS(open64, (const char *path, int flags, ...), (path, flags, mode), AT_FDCWD)
OPENS(openat, (int at, const char *path, int flags, ...), (at, path, flags, mode), at)
OPENS(openat64, (int at, const char *path, int flags, ...), (at, path, flags, mode), at)
