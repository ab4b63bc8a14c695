/* Injects faults into a program (ld.so(8), LD_PRELOAD): file operations that fail, and a clock that
 * is wrong. Counts the operations that change files below a directory, and makes the k-th one fail,
 * or also all that follow. Records the operations in their order, if a file for that is named.
 *
 * MEMFOLD_FAULT_PLACE   the directory
 * MEMFOLD_FAULT_CONTROL a file with a struct control, which the test writes
 * MEMFOLD_FAULT_RECORD  a file for the record (recorded.rs reads it)
 *
 * std, SQLite and QEMU call these functions of libc. rustix makes system calls of its own. seccomp(2)
 * turns those of them that change files on a disk (TRAPPED) into a signal, whose handler does what
 * the functions of libc do here. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

enum { ERROR = 1, SHORT = 2 };

/* Little endian, without padding; the test reads and writes it as bytes. */
struct control {
    _Atomic int64_t at;    /* which operation fails, from 1; 0: none, operations are only counted */
    _Atomic int64_t count; /* operations so far */
    _Atomic int64_t fired; /* faults so far */
    int64_t kind;          /* ERROR, or SHORT: a write writes half of its bytes */
    int64_t number;        /* errno */
    int64_t sticky;        /* whether all operations after the k-th fail, too */
    char what[256];        /* the first operation that failed */
    _Atomic int64_t clock; /* seconds by which the clock of 'memfold' is ahead of the host's */
};

static struct control *control;
static char place[4096];
static size_t place_length;
static int is_memfold;
/* The file for the record, and its descriptor while an event is recorded. */
static char record_file[4096];
static int record = -1;

#define NEXT(name) \
    static __typeof__(name) *next; \
    if (!next) next = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

static int is_inside(const char *path) {
    return strncmp(path, place, place_length) == 0 && path[place_length] == '/';
}

/* Finds the absolute path of an open file; 0: it has none. */
static int of_descriptor(int fd, char *path, size_t length) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t count = readlink(link, path, length - 1);
    if (count < 0) return 0;
    path[count] = 0;
    return path[0] == '/';
}

/* Finds the absolute path of a file, of 8192 bytes at most; 0: it is not below the place. */
static int of_path(int directory, const char *path, char *whole) {
    if (!control || !path) return 0;
    if (path[0] == '/') {
        snprintf(whole, 8192, "%s", path);
    } else {
        if (directory == AT_FDCWD ? !getcwd(whole, 4096) : !of_descriptor(directory, whole, 4096)) return 0;
        size_t length = strlen(whole);
        snprintf(whole + length, 8192 - length, "/%s", path);
    }
    return is_inside(whole);
}

/* Whether this operation on a file below the place fails. */
static int fails(const char *name, const char *path) {
    int64_t number = atomic_fetch_add(&control->count, 1) + 1, at = atomic_load(&control->at);
    if (at == 0 || number < at || (number > at && !control->sticky)) return 0;
    if (atomic_fetch_add(&control->fired, 1) == 0)
        snprintf(control->what, sizeof control->what, "%s %s", name, path + place_length + 1);
    errno = (int)control->number;
    return 1;
}

static int fails_fd(const char *name, int fd) {
    int before = errno;
    char path[4096];
    int is_ours = control && of_descriptor(fd, path, sizeof path) && is_inside(path);
    errno = before;
    return is_ours && fails(name, path);
}

/* ---- The record: one struct event after the other, each with its paths (relative to the place)
 * and the bytes that were written. ---- */

enum { CREATED = 1, WROTE, ZEROED, TRUNCATED, SYNCED, RENAMED, EXCHANGED, LINKED, SYMLINKED, MADE, UNLINKED, REMOVED, SYNCED_ALL };

struct event {
    uint32_t kind, first, second, reserved; /* lengths of the two paths */
    uint64_t inode, at, length;             /* a file, an offset in it, a number of bytes */
};

static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;

/* memfold lists the files that QEMU has open for writing. The record is not QEMU's own file. */
ssize_t readlink(const char *path, char *target, size_t size) {
    NEXT(readlink);
    ssize_t length = next(path, target, size);
    if (!record_file[0] || length != (ssize_t)strlen(record_file) || memcmp(target, record_file, length)) return length;
    errno = ENOENT;
    return -1;
}

/* Operations and their events have the same order in all processes. */
static int lock_record(void) {
    NEXT(open);
    if (!record_file[0]) return 0;
    int before = errno;
    pthread_mutex_lock(&turn);
    record = next(record_file, O_WRONLY | O_APPEND | O_CLOEXEC);
    if (record < 0) abort();
    while (flock(record, LOCK_EX) < 0 && errno == EINTR) continue;
    errno = before;
    return 1;
}

static void unlock_record(void) {
    int before = errno;
    close(record);
    record = -1;
    pthread_mutex_unlock(&turn);
    errno = before;
}

/* `parts`, with `length` bytes in all at least: what was written. */
static void append(struct event event, const char *first, const char *second, const struct iovec *parts, int count) {
    NEXT(writev);
    int before = errno;
    if (first && is_inside(first)) first += place_length + 1;
    if (second && is_inside(second)) second += place_length + 1;
    event.first = first ? strlen(first) : 0;
    event.second = second ? strlen(second) : 0;
    size_t bytes = event.kind == WROTE ? event.length : 0, used = 0;
    char *written = malloc(bytes + 1);
    if (!written) abort();
    for (int part = 0; part < count && used < bytes; part++) {
        size_t length = parts[part].iov_len < bytes - used ? parts[part].iov_len : bytes - used;
        memcpy(written + used, parts[part].iov_base, length);
        used += length;
    }
    struct iovec all[] = {{&event, sizeof event}, {(void *)first, event.first}, {(void *)second, event.second}, {written, bytes}};
    size_t whole = sizeof event + event.first + event.second + bytes;
    if (used < bytes || next(record, all, 4) != (ssize_t)whole) abort();
    free(written);
    errno = before;
}

static int is_recorded(int fd, struct stat *facts) {
    char path[4096];
    int before = errno;
    int is = record >= 0 && of_descriptor(fd, path, sizeof path) && is_inside(path) && fstat(fd, facts) == 0;
    errno = before;
    return is && (S_ISREG(facts->st_mode) || S_ISDIR(facts->st_mode));
}

/* Records that `done` bytes were written, which end at `end`. */
static void wrote(int fd, const struct iovec *parts, int count, ssize_t done, off_t at) {
    struct stat facts;
    if (done <= 0 || !is_recorded(fd, &facts)) return;
    if (at < 0) at = lseek(fd, 0, SEEK_CUR) - done;
    append((struct event){WROTE, .inode = facts.st_ino, .at = at, .length = done}, NULL, NULL, parts, count);
}

/* Records bytes that the kernel has written. */
static void wrote_in_kernel(int fd, ssize_t done, off_t at) {
    struct stat facts;
    if (done <= 0 || !is_recorded(fd, &facts)) return;
    if (at < 0) at = lseek(fd, 0, SEEK_CUR) - done;
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    NEXT(open);
    int again = next(link, O_RDONLY | O_CLOEXEC);
    void *bytes = malloc(done);
    if (again < 0 || !bytes || pread(again, bytes, done, at) != done) abort();
    close(again);
    struct iovec part = {bytes, done};
    append((struct event){WROTE, .inode = facts.st_ino, .at = at, .length = done}, NULL, NULL, &part, 1);
    free(bytes);
}

static void changed(int kind, int fd, uint64_t at, uint64_t length) {
    struct stat facts;
    if (is_recorded(fd, &facts)) append((struct event){kind, .inode = facts.st_ino, .at = at, .length = length}, NULL, NULL, NULL, 0);
}

static void changed_path(int kind, uint64_t inode, const char *first, const char *second) {
    append((struct event){kind, .inode = inode}, first, second, NULL, 0);
}

/* ---- The functions of libc. ---- */

#define OPENS(name, directory, ...) \
    char whole[8192]; \
    int changes = flags & (O_CREAT | O_TRUNC) && (flags & O_TMPFILE) != O_TMPFILE; \
    if (!changes || !of_path(directory, path, whole)) return next(__VA_ARGS__); \
    if (control->kind != SHORT && fails(#name, whole)) return -1; \
    if (!lock_record()) return next(__VA_ARGS__); \
    struct stat facts; \
    int before = errno, was = stat(whole, &facts) == 0; \
    errno = before; \
    int fd = next(__VA_ARGS__); \
    if (fd >= 0 && fstat(fd, &facts) == 0 && S_ISREG(facts.st_mode)) { \
        if (!was) changed_path(CREATED, facts.st_ino, whole, NULL); \
        else if (flags & O_TRUNC) changed(TRUNCATED, fd, 0, 0); \
    } \
    unlock_record(); \
    return fd

#define MODE \
    va_list more; \
    va_start(more, flags); \
    mode_t mode = va_arg(more, mode_t); \
    va_end(more)

#define OPEN(name) \
    int name(const char *path, int flags, ...) { NEXT(name); MODE; OPENS(name, AT_FDCWD, path, flags, mode); }
OPEN(open)
OPEN(open64)

#define OPENAT(name) \
    int name(int directory, const char *path, int flags, ...) { NEXT(name); MODE; OPENS(name, directory, directory, path, flags, mode); }
OPENAT(openat)
OPENAT(openat64)

/* A failed write of kind SHORT writes half of its bytes, as a disk that is nearly full does. */
static size_t shortened(size_t length) { return length > 1 ? length / 2 : length; }

#define WRITES(name, arguments, position, ...) \
    ssize_t name arguments { \
        NEXT(name); \
        if (fails_fd(#name, fd)) { \
            if (control->kind != SHORT) return -1; \
            length = shortened(length); \
        } \
        if (!lock_record()) return next(__VA_ARGS__); \
        ssize_t done = next(__VA_ARGS__); \
        wrote(fd, &(struct iovec){(void *)from, length}, 1, done, position); \
        unlock_record(); \
        return done; \
    }
WRITES(write, (int fd, const void *from, size_t length), -1, fd, from, length)
WRITES(pwrite, (int fd, const void *from, size_t length, off_t at), at, fd, from, length, at)
WRITES(pwrite64, (int fd, const void *from, size_t length, off64_t at), at, fd, from, length, at)

/* A short write of a vector writes half of its first part. */
#define WRITES_VECTOR(name, arguments, position, ...) \
    ssize_t name arguments { \
        NEXT(name); \
        struct iovec half; \
        if (count > 0 && fails_fd(#name, fd)) { \
            if (control->kind != SHORT) return -1; \
            half = (struct iovec){parts[0].iov_base, shortened(parts[0].iov_len)}; \
            parts = &half; \
            count = 1; \
        } \
        if (!lock_record()) return next(__VA_ARGS__); \
        ssize_t done = next(__VA_ARGS__); \
        wrote(fd, parts, count, done, position); \
        unlock_record(); \
        return done; \
    }
WRITES_VECTOR(writev, (int fd, const struct iovec *parts, int count), -1, fd, parts, count)
WRITES_VECTOR(pwritev, (int fd, const struct iovec *parts, int count, off_t at), at, fd, parts, count, at)
WRITES_VECTOR(pwritev64, (int fd, const struct iovec *parts, int count, off64_t at), at, fd, parts, count, at)

ssize_t copy_file_range(int from, off64_t *at, int to, off64_t *to_at, size_t length, unsigned flags) {
    NEXT(copy_file_range);
    if (control && control->kind != SHORT && fails_fd("copy_file_range", to)) return -1;
    if (!lock_record()) return next(from, at, to, to_at, length, flags);
    off64_t position = to_at ? *to_at : -1;
    ssize_t done = next(from, at, to, to_at, length, flags);
    wrote_in_kernel(to, done, position);
    unlock_record();
    return done;
}

ssize_t sendfile64(int to, int from, off64_t *at, size_t length) {
    NEXT(sendfile64);
    if (control && control->kind != SHORT && fails_fd("sendfile", to)) return -1;
    if (!lock_record()) return next(to, from, at, length);
    ssize_t done = next(to, from, at, length);
    wrote_in_kernel(to, done, -1);
    unlock_record();
    return done;
}

#define OF_DESCRIPTOR(name, arguments, done, ...) \
    int name arguments { \
        NEXT(name); \
        if (control && control->kind != SHORT && fails_fd(#name, fd)) return -1; \
        if (!lock_record()) return next(__VA_ARGS__); \
        int result = next(__VA_ARGS__); \
        if (result == 0) done; \
        unlock_record(); \
        return result; \
    }
OF_DESCRIPTOR(fsync, (int fd), changed(SYNCED, fd, 0, 0), fd)
OF_DESCRIPTOR(fdatasync, (int fd), changed(SYNCED, fd, 0, 0), fd)
OF_DESCRIPTOR(ftruncate, (int fd, off_t length), changed(TRUNCATED, fd, 0, length), fd, length)
OF_DESCRIPTOR(ftruncate64, (int fd, off64_t length), changed(TRUNCATED, fd, 0, length), fd, length)

/* A call with two paths, or with one and a text. */
#define OF_PATHS(name, arguments, a, from, b, to, event_kind, ...) \
    int name arguments { \
        NEXT(name); \
        char first[8192], second[8192]; \
        if (!of_path(b, to, second)) return next(__VA_ARGS__); \
        if (control->kind != SHORT && fails(#name, second)) return -1; \
        if (!lock_record()) return next(__VA_ARGS__); \
        int result = next(__VA_ARGS__); \
        int is_text = event_kind == SYMLINKED; \
        if (!is_text && !of_path(a, from, first)) snprintf(first, sizeof first, "%s", from); \
        if (result == 0) changed_path(event_kind, 0, is_text ? from : first, second); \
        unlock_record(); \
        return result; \
    }
OF_PATHS(rename, (const char *from, const char *to), AT_FDCWD, from, AT_FDCWD, to, RENAMED, from, to)
OF_PATHS(renameat, (int a, const char *from, int b, const char *to), a, from, b, to, RENAMED, a, from, b, to)
OF_PATHS(link, (const char *from, const char *to), AT_FDCWD, from, AT_FDCWD, to, LINKED, from, to)
OF_PATHS(symlink, (const char *from, const char *to), AT_FDCWD, from, AT_FDCWD, to, SYMLINKED, from, to)

/* A full disk still lets files be removed. */
#define OF_PATH(name, arguments, directory, path, removes, event_kind, ...) \
    int name arguments { \
        NEXT(name); \
        char whole[8192]; \
        if (!of_path(directory, path, whole)) return next(__VA_ARGS__); \
        int can_fail = control->kind != SHORT && !(removes && control->number == ENOSPC); \
        if (can_fail && fails(#name, whole)) return -1; \
        if (!lock_record()) return next(__VA_ARGS__); \
        int result = next(__VA_ARGS__); \
        struct stat facts = {0}; \
        if (result == 0 && (event_kind) == MADE) stat(whole, &facts); \
        if (result == 0) changed_path(event_kind, facts.st_ino, whole, NULL); \
        unlock_record(); \
        return result; \
    }
OF_PATH(mkdir, (const char *path, mode_t mode), AT_FDCWD, path, 0, MADE, path, mode)
OF_PATH(mkdirat, (int directory, const char *path, mode_t mode), directory, path, 0, MADE, directory, path, mode)
OF_PATH(unlink, (const char *path), AT_FDCWD, path, 1, UNLINKED, path)
OF_PATH(unlinkat, (int directory, const char *path, int flags), directory, path, 1, flags & AT_REMOVEDIR ? REMOVED : UNLINKED, directory, path, flags)
OF_PATH(rmdir, (const char *path), AT_FDCWD, path, 1, REMOVED, path)

/* ---- System calls of rustix. ---- */

/* Code that makes a system call with five arguments, at an address that the filter lets pass:
 * mov rax,rdi; mov rdi,rsi; mov rsi,rdx; mov rdx,rcx; mov r10,r8; mov r8,r9; syscall; ret */
#define CODE ((void *)0x6d666f6c0000)
static const unsigned char code[] = {0x48, 0x89, 0xf8, 0x48, 0x89, 0xf7, 0x48, 0x89, 0xd6, 0x48, 0x89,
                                     0xca, 0x4d, 0x89, 0xc2, 0x4d, 0x89, 0xc8, 0x0f, 0x05, 0xc3};
#define AFTER_SYSCALL ((uintptr_t)CODE + 20)

static long raw(long number, long a, long b, long c, long d, long e) {
    return ((long (*)(long, long, long, long, long, long))CODE)(number, a, b, c, d, e);
}

static int returns(long result) {
    if (result >= 0) return (int)result;
    errno = (int)-result;
    return -1;
}

int renameat2(int a, const char *from, int b, const char *to, unsigned flags) {
    char first[8192], second[8192];
    int is_ours = of_path(b, to, second) && of_path(a, from, first);
    if (is_ours && control->kind != SHORT && fails("renameat2", second)) return -1;
    int records = is_ours && lock_record();
    int result = returns(raw(SYS_renameat2, a, (long)from, b, (long)to, flags));
    if (result == 0 && records) changed_path(flags & RENAME_EXCHANGE ? EXCHANGED : RENAMED, 0, first, second);
    if (records) unlock_record();
    return result;
}

int linkat(int a, const char *from, int b, const char *to, int flags) {
    char first[8192], second[8192];
    int is_ours = of_path(b, to, second);
    if (is_ours && control->kind != SHORT && fails("linkat", second)) return -1;
    int records = is_ours && lock_record();
    /* A name for an open file. */
    int open = records && sscanf(from, "/proc/self/fd/%d", &a) == 1;
    int is_known = records && (open ? of_descriptor(a, first, sizeof first) : of_path(a, from, first));
    int result = returns(raw(SYS_linkat, a, (long)from, b, (long)to, flags));
    if (result == 0 && is_known) changed_path(LINKED, 0, first, second);
    if (records) unlock_record();
    return result;
}

int fallocate(int fd, int mode, off_t at, off_t length) {
    if (control && control->kind != SHORT && fails_fd("fallocate", fd)) return -1;
    int records = lock_record(), zeroes = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_ZERO_RANGE;
    int result = returns(raw(SYS_fallocate, fd, mode, at, length, 0));
    struct stat facts;
    if (result == 0 && records && mode & zeroes) changed(ZEROED, fd, at, length);
    if (result == 0 && records && !(mode & FALLOC_FL_KEEP_SIZE) && is_recorded(fd, &facts)) changed(TRUNCATED, fd, 0, facts.st_size);
    if (records) unlock_record();
    return result;
}

int fallocate64(int fd, int mode, off64_t at, off64_t length) { return fallocate(fd, mode, at, length); }

int syncfs(int fd) {
    if (control && control->kind != SHORT && fails_fd("syncfs", fd)) return -1;
    int records = lock_record();
    int result = returns(raw(SYS_syncfs, fd, 0, 0, 0, 0));
    if (result == 0 && records) changed(SYNCED_ALL, fd, 0, 0);
    if (records) unlock_record();
    return result;
}

static void trapped(int signal, siginfo_t *info, void *context) {
    (void)signal;
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    long a = registers[REG_RDI], b = registers[REG_RSI], c = registers[REG_RDX], d = registers[REG_R10], e = registers[REG_R8];
    int before = errno, result = -1;
    errno = ENOSYS;
    if (info->si_syscall == SYS_renameat2) result = renameat2(a, (const char *)b, c, (const char *)d, e);
    if (info->si_syscall == SYS_linkat) result = linkat(a, (const char *)b, c, (const char *)d, e);
    if (info->si_syscall == SYS_fallocate) result = fallocate(a, b, c, d);
    if (info->si_syscall == SYS_syncfs) result = syncfs(a);
    registers[REG_RAX] = result < 0 ? -errno : result;
    errno = before;
}

#define TRAPPED(number) \
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 4), \
    BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, instruction_pointer)), \
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)AFTER_SYSCALL, 1, 0), \
    BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP), \
    BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)

static void begin_traps(void) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;
    void *map = mmap(CODE, 4096, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (map != CODE) abort();
    memcpy(map, code, sizeof code);
    if (mprotect(map, 4096, PROT_READ | PROT_EXEC)) abort();
    struct sigaction action = {.sa_sigaction = trapped, .sa_flags = SA_SIGINFO | SA_NODEFER};
    if (sigaction(SIGSYS, &action, NULL)) abort();
    /* Programs that this one starts inherit the filter, and the address is the same in all. */
    if (!is_memfold) return;
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        TRAPPED(SYS_renameat2),
        TRAPPED(SYS_linkat),
        TRAPPED(SYS_fallocate),
        TRAPPED(SYS_syncfs),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) abort();
}

/* ---- The clock. ---- */

int clock_gettime(clockid_t clock, struct timespec *now) {
    NEXT(clock_gettime);
    int result = next(clock, now);
    int is_of_day = clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE;
    if (result == 0 && is_memfold && is_of_day && control) now->tv_sec += control->clock;
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    (void)zone;
    struct timespec precise;
    int result = clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return result;
}

time_t time(time_t *out) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (out) *out = precise.tv_sec;
    return precise.tv_sec;
}

__attribute__((constructor)) static void begin(void) {
    const char *directory = getenv("MEMFOLD_FAULT_PLACE"), *file = getenv("MEMFOLD_FAULT_CONTROL");
    if (!directory || !file || strlen(directory) >= sizeof place) return;
    int fd = open(file, O_RDWR | O_CLOEXEC);
    if (fd < 0) return;
    void *map = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (map == MAP_FAILED) return;
    strcpy(place, directory);
    place_length = strlen(place);
    is_memfold = strcmp(program_invocation_short_name, "memfold") == 0;
    control = map;
    const char *recorded = getenv("MEMFOLD_FAULT_RECORD");
    if (recorded && !realpath(recorded, record_file)) abort();
    begin_traps();
}
