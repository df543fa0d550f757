/* Kills a process at a chosen system call, or makes chosen calls fail; counts and writes down what it calls.
 *
 * Preloaded (LD_PRELOAD) into the harness's fork server; a daemon forked from it names a file, the control block, with
 * fault_begin(). The harness maps the same file, so it can arm a kill or a failure while the daemon runs, and read the counts of
 * one that was killed. Only the process that called fault_begin() is counted and killed: what it starts is left alone, but for
 * the execve of its children, which counts as its own. The layout of the block is the one of `Block` in faults.py. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { WRITE, PWRITE, FSYNC, FDATASYNC, RENAME, FTRUNCATE, UNLINK, EXECVE, SENDTO, CONNECT, PIDFD_SEND_SIGNAL, CREATE, FALLOCATE,
       MKDIR, CALLS };
enum { PHASES = 12, BEFORE = 0, AFTER = 1, HALF = 2, ANY = -1 };

struct block {
    int32_t pid, phase;
    int32_t kill_call, kill_phase, kill_n, kill_when; /* kill_n 0: not armed */
    int32_t kill_seen, killed;
    int32_t fail_mask, fail_errno, fail_skip, fail_times; /* fail_mask 0: not armed */
    int32_t fail_seen, failed;
    int32_t visits[PHASES]; /* counted by the daemon's own side */
    int32_t counts[PHASES][CALLS];
};

static struct block *block;
static int trace_fd = -1;
static __thread int last_was_chosen;

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

static long raw(long number, long a, long b, long c, long d) {
    static long (*real)(long, ...);
    if (!real) real = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    return real(number, a, b, c, d);
}

/* Take this process as the one that is meant; `trace` is a file to write down what becomes of files, or "". */
int fault_begin(const char *path, const char *trace) {
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return -1;
    struct block *found = mmap(NULL, sizeof *found, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (found == MAP_FAILED) return -1;
    if (*trace) trace_fd = open(trace, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    found->pid = getpid();
    block = found;
    return 0;
}

static void die(int call) {
    block->killed = call + 1;
    raw(SYS_kill, block->pid, SIGKILL, 0, 0);
    if (getpid() == block->pid)
        for (;;) pause();
}

/* Count a call; kill here if this is the chosen one. Return the errno that it is to fail with, or 0. */
static int point(int call) {
    last_was_chosen = 0;
    if (!block) return 0;
    if (getpid() != block->pid && !(call == EXECVE && getppid() == block->pid)) return 0;
    int phase = block->phase;
    if (phase < 0 || phase >= PHASES) return 0;
    __atomic_add_fetch(&block->counts[phase][call], 1, __ATOMIC_RELAXED);
    if (block->kill_n && block->kill_call == call && (block->kill_phase == ANY || block->kill_phase == phase)
        && __atomic_add_fetch(&block->kill_seen, 1, __ATOMIC_RELAXED) == block->kill_n) {
        if (block->kill_when == BEFORE) die(call);
        else last_was_chosen = 1;
    }
    if (block->fail_mask & (1 << call)) {
        int seen = __atomic_add_fetch(&block->fail_seen, 1, __ATOMIC_RELAXED);
        if (seen > block->fail_skip && (block->fail_times < 0 || seen <= block->fail_skip + block->fail_times)) {
            __atomic_add_fetch(&block->failed, 1, __ATOMIC_RELAXED);
            return block->fail_errno;
        }
    }
    return 0;
}

static void after(int call) {
    if (last_was_chosen) die(call);
}

static int half(void) { return last_was_chosen && block->kill_when == HALF; }

/* Files alone: a full disk does not stop a socket, and standard output and error belong to the harness. */
static int on_disk(int fd) {
    struct stat st;
    return fd > 2 && fstat(fd, &st) == 0 && S_ISREG(st.st_mode);
}

/* Write down what becomes of a file: a header line and, of a write, the bytes. In one call, so that processes do not mix. */
static void note(const char *what, int fd, long long from, long long size, const void *data) {
    char link[64], path[1024], head[1200];
    if (trace_fd < 0 || !block || getpid() != block->pid || fd == trace_fd || fd <= 2) return;
    int kept = errno;
    struct stat st;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t got = readlink(link, path, sizeof path - 1);
    if (got > 0 && fstat(fd, &st) == 0 && S_ISREG(st.st_mode)) {
        path[got] = 0;
        int n = snprintf(head, sizeof head, "%s %lld %lld %llu %s\n", what, from, size, (unsigned long long)st.st_ino, path);
        struct iovec parts[2] = {{head, (size_t)n}, {(void *)data, data ? (size_t)size : 0}};
        raw(SYS_writev, trace_fd, (long)parts, 2, 0);
    }
    errno = kept;
}

#define FAIL_IF(error) \
    do { int e_ = (error); if (e_) { errno = e_; return -1; } } while (0)

ssize_t write(int fd, const void *data, size_t size) {
    REAL(write);
    int file = block && on_disk(fd);
    int mask = block ? block->fail_mask : 0;
    if (!file && (mask & (1 << WRITE))) return real(fd, data, size);
    FAIL_IF(point(WRITE));
    ssize_t done = real(fd, data, half() ? size / 2 : size);
    if (file && done > 0) note("w", fd, (long long)lseek(fd, 0, SEEK_CUR) - done, done, data);
    after(WRITE);
    return done;
}

static ssize_t put(ssize_t (*real)(int, const void *, size_t, off64_t), int fd, const void *data, size_t size, off64_t at) {
    FAIL_IF(point(PWRITE));
    ssize_t done = real(fd, data, half() ? size / 2 : size, at);
    if (done > 0) note("w", fd, at, done, data);
    after(PWRITE);
    return done;
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    REAL(pwrite64);
    return put(real, fd, data, size, at);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    return pwrite64(fd, data, size, at);
}

static int sync_with(int (*real)(int), int call, int fd) {
    int error = point(call);
    if (error) {
        note("f", fd, 0, 0, NULL);
        errno = error;
        return -1;
    }
    int done = real(fd);
    note(done ? "f" : "s", fd, 0, 0, NULL);
    after(call);
    return done;
}

int fsync(int fd) {
    REAL(fsync);
    return sync_with(real, FSYNC, fd);
}

int fdatasync(int fd) {
    REAL(fdatasync);
    return sync_with(real, FDATASYNC, fd);
}

#define PLAIN(name, call, parameters, arguments) \
    int name parameters { \
        REAL(name); \
        FAIL_IF(point(call)); \
        int done = real arguments; \
        after(call); \
        return done; \
    }

PLAIN(rename, RENAME, (const char *from, const char *to), (from, to))
PLAIN(renameat, RENAME, (int a, const char *from, int b, const char *to), (a, from, b, to))
PLAIN(unlink, UNLINK, (const char *path), (path))
PLAIN(unlinkat, UNLINK, (int at, const char *path, int flags), (at, path, flags))
PLAIN(truncate64, FTRUNCATE, (const char *path, off64_t size), (path, size))
PLAIN(mkdir, MKDIR, (const char *path, mode_t mode), (path, mode))
PLAIN(connect, CONNECT, (int fd, const struct sockaddr *to, socklen_t size), (fd, to, size))
PLAIN(execve, EXECVE, (const char *path, char *const argv[], char *const env[]), (path, argv, env))
PLAIN(execv, EXECVE, (const char *path, char *const argv[]), (path, argv))

int truncate(const char *path, off_t size) { return truncate64(path, size); }

int ftruncate64(int fd, off64_t size) {
    REAL(ftruncate64);
    FAIL_IF(point(FTRUNCATE));
    int done = real(fd, size);
    if (!done) note("t", fd, 0, size, NULL);
    after(FTRUNCATE);
    return done;
}

int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }

int posix_fallocate64(int fd, off64_t at, off64_t size) {
    REAL(posix_fallocate64);
    int error = point(FALLOCATE);
    if (error) return error;
    int done = real(fd, at, size);
    after(FALLOCATE);
    return done;
}

int posix_fallocate(int fd, off_t at, off_t size) { return posix_fallocate64(fd, at, size); }

#define SENDING(name, parameters, arguments) \
    ssize_t name parameters { \
        REAL(name); \
        FAIL_IF(point(SENDTO)); \
        ssize_t done = real arguments; \
        after(SENDTO); \
        return done; \
    }

SENDING(send, (int fd, const void *data, size_t size, int flags), (fd, data, size, flags))
SENDING(sendto, (int fd, const void *data, size_t size, int flags, const struct sockaddr *to, socklen_t length),
        (fd, data, size, flags, to, length))
SENDING(sendmsg, (int fd, const struct msghdr *message, int flags), (fd, message, flags))

static void note_new(int fd) {
    struct stat st;
    if (trace_fd >= 0 && fstat(fd, &st) == 0 && st.st_size == 0) note("n", fd, 0, 0, NULL);
}

#define OPENING(name, parameters, arguments) \
    int name parameters { \
        REAL(name); \
        mode_t mode = 0; \
        if (flags & (O_CREAT | O_TMPFILE)) { \
            va_list rest; \
            va_start(rest, flags); \
            mode = va_arg(rest, mode_t); \
            va_end(rest); \
        } \
        int creates = flags & O_CREAT; \
        if (creates) FAIL_IF(point(CREATE)); \
        int done = real arguments; \
        if (done >= 0 && creates) note_new(done); \
        if (creates) after(CREATE); \
        return done; \
    }

OPENING(open, (const char *path, int flags, ...), (path, flags, mode))
OPENING(open64, (const char *path, int flags, ...), (path, flags, mode))
OPENING(openat, (int at, const char *path, int flags, ...), (at, path, flags, mode))
OPENING(openat64, (int at, const char *path, int flags, ...), (at, path, flags, mode))

/* Python has no wrapper of pidfd_send_signal to call and goes through here. */
long syscall(long number, ...) {
    static long (*real)(long, ...);
    if (!real) real = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    va_list rest;
    va_start(rest, number);
    long a = va_arg(rest, long), b = va_arg(rest, long), c = va_arg(rest, long);
    long d = va_arg(rest, long), e = va_arg(rest, long), f = va_arg(rest, long);
    va_end(rest);
    int signals = number == SYS_pidfd_send_signal;
    if (signals) FAIL_IF(point(PIDFD_SEND_SIGNAL));
    long done = real(number, a, b, c, d, e, f);
    if (signals) after(PIDFD_SEND_SIGNAL);
    return done;
}
