/* A server that streams tokens without any inference and keeps the truth about them: what a load client should have seen.
 *
 *   cc -O2 -o nullserver nullserver.c && ./nullserver [PORT]        127.0.0.1 only; port 0 (the default) is any free one
 *
 * One thread, epoll. One token is one SSE event in one HTTP chunk of about 220 bytes, fields as vLLM sends them; usage in a
 * last event if the request asks for it. The schedule is set with GET /ctl?ttft=MS&itl=MS&burst=N:
 *
 *   itl > 0    token k of a request is due at its arrival + ttft + k * itl, whatever the client does; a late client does not
 *              delay it until the kernel's buffers are full, which is counted as a stall. With burst = N the tokens go out N at
 *              a time, every N * itl, as servers do that batch.
 *   itl = 0    flood: no schedule, `burst` events per send(), round robin, as fast as the client takes them.
 *
 * GET /reset forgets what was counted; GET /stats tells it as JSON: tokens, requests, TTFT and ITL as written (ms), lateness
 * against the schedule, stalls, this process's own CPU seconds, times on CLOCK_MONOTONIC (ns). On stdout it writes a line
 * "ready PORT" once it listens, "first" when the first request since a reset arrives, and "last" when as many requests as
 * /ctl?expect=N said have been answered. It ends with the process that started it.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define CONNS_MAX 8192
#define WORDS_N 8
#define BURST_MAX 200
#define READ_SIZE 32768
#define BUCKETS 200000 /* of 10 us each, so up to 2 s */

typedef int64_t i64;

typedef struct {
    char *text;
    int size;
} blob;

typedef struct {
    int fd, used;
    char *in; /* what was read and not yet understood */
    int in_len, in_cap;
    char *out; /* what the socket did not take */
    int out_len, out_off, out_cap;
    int want_out;
    /* the request being answered */
    int active, chat, usage, started, tokens, sent, prompt_tokens, burst;
    i64 itl, due, arrived, last;
} conn;

static conn conns[CONNS_MAX];
static int epoll_fd;
static double set_ttft, set_itl;
static int set_burst = 1;
static i64 set_expect;

static int heap[CONNS_MAX], heap_n;   /* streams with a schedule, the one due next first */
static int flood[CONNS_MAX], flood_n; /* streams without one */

static const char *WORDS[WORDS_N] = {" the", " light", "house", " keeper", " watched", " over", " cold", " sea"};
static blob event_of[2][WORDS_N], last_event_of[2][WORDS_N]; /* [chat][word] */

/* The truth. */
static uint32_t seen_itl[BUCKETS], seen_ttft[BUCKETS], seen_late[BUCKETS];
static struct {
    i64 tokens, requests, done, aborted, connections, writes, stalls, bytes, first, last, since;
    int live, max_live;
    double cpu_before;
} truth;

static i64 now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static double cpu_s(void) {
    struct rusage r;
    getrusage(RUSAGE_SELF, &r);
    return r.ru_utime.tv_sec + r.ru_stime.tv_sec + (r.ru_utime.tv_usec + r.ru_stime.tv_usec) / 1e6;
}

static void *must(void *memory) {
    if (!memory) {
        fputs("nullserver: out of memory\n", stderr);
        exit(1);
    }
    return memory;
}

static void say(const char *line) {
    if (write(STDOUT_FILENO, line, strlen(line)) < 0) exit(0); /* nobody listens any more */
}

static void count(uint32_t *histogram, i64 ns) {
    i64 bucket = ns / 10000;
    histogram[bucket < 0 ? 0 : bucket >= BUCKETS ? BUCKETS - 1 : bucket]++;
}

static double quantile_ms(const uint32_t *histogram, double q) {
    i64 total = 0, seen = 0;
    for (int i = 0; i < BUCKETS; i++) total += histogram[i];
    if (!total) return -1;
    for (int i = 0; i < BUCKETS; i++) {
        seen += histogram[i];
        if (seen >= q * total) return (i + 0.5) / 100.0;
    }
    return BUCKETS / 100.0;
}

static void reset(void) {
    int live = truth.live;
    memset(seen_itl, 0, sizeof seen_itl);
    memset(seen_ttft, 0, sizeof seen_ttft);
    memset(seen_late, 0, sizeof seen_late);
    memset(&truth, 0, sizeof truth);
    truth.live = truth.max_live = live;
    truth.cpu_before = cpu_s();
    truth.since = now_ns();
}

/* The heap of streams with a schedule. */

static void heap_swap(int a, int b) {
    int fd = heap[a];
    heap[a] = heap[b];
    heap[b] = fd;
}

static void heap_up(int i) {
    for (; i && conns[heap[i]].due < conns[heap[(i - 1) / 2]].due; i = (i - 1) / 2) heap_swap(i, (i - 1) / 2);
}

static void heap_down(int i) {
    for (;;) {
        int left = 2 * i + 1, right = left + 1, least = i;
        if (left < heap_n && conns[heap[left]].due < conns[heap[least]].due) least = left;
        if (right < heap_n && conns[heap[right]].due < conns[heap[least]].due) least = right;
        if (least == i) return;
        heap_swap(i, least);
        i = least;
    }
}

static void heap_push(int fd) {
    heap[heap_n] = fd;
    heap_up(heap_n++);
}

static void heap_pop(void) {
    heap[0] = heap[--heap_n];
    heap_down(0);
}

static void forget_stream(int fd) {
    for (int i = 0; i < heap_n; i++)
        if (heap[i] == fd) {
            heap[i] = heap[--heap_n];
            if (i < heap_n) {
                heap_down(i);
                heap_up(i);
            }
            break;
        }
    for (int i = 0; i < flood_n; i++)
        if (flood[i] == fd) {
            flood[i] = flood[--flood_n];
            break;
        }
}

/* Connections. */

static void watch_out(conn *c, int on) {
    if (c->want_out == on) return;
    c->want_out = on;
    struct epoll_event e = {.events = EPOLLIN | (on ? EPOLLOUT : 0), .data.fd = c->fd};
    epoll_ctl(epoll_fd, EPOLL_CTL_MOD, c->fd, &e);
}

static void drop(conn *c) {
    if (!c->used) return;
    if (c->active) {
        truth.aborted++;
        truth.live--;
        forget_stream(c->fd);
    }
    close(c->fd);
    free(c->in);
    free(c->out);
    memset(c, 0, sizeof *c);
}

/* Write on; return 1 when nothing is left, 0 when the socket is full, -1 when the connection is dead. */
static int flush(conn *c) {
    while (c->out_off < c->out_len) {
        ssize_t n = send(c->fd, c->out + c->out_off, c->out_len - c->out_off, MSG_NOSIGNAL);
        truth.writes++;
        if (n < 0) {
            if (errno == EAGAIN) return 0;
            drop(c);
            return -1;
        }
        truth.bytes += n;
        c->out_off += n;
    }
    c->out_off = c->out_len = 0;
    watch_out(c, 0);
    return 1;
}

/* Write these bytes, or keep what the socket does not take; return -1 when the connection is dead. */
static int put(conn *c, const char *bytes, int size) {
    if (!c->out_len) {
        ssize_t n = send(c->fd, bytes, size, MSG_NOSIGNAL);
        truth.writes++;
        if (n < 0 && errno != EAGAIN) {
            drop(c);
            return -1;
        }
        if (n < 0) n = 0;
        truth.bytes += n;
        if (n == size) return 1;
        bytes += n;
        size -= n;
        truth.stalls++;
    }
    if (c->out_len + size > c->out_cap) {
        c->out_cap = (c->out_len + size) * 2 + 4096;
        c->out = must(realloc(c->out, c->out_cap));
    }
    memcpy(c->out + c->out_len, bytes, size);
    c->out_len += size;
    watch_out(c, 1);
    return 0;
}

static void put_json(conn *c, const char *status, const char *body) {
    char answer[4096];
    int n = snprintf(answer, sizeof answer,
                     "HTTP/1.1 %s\r\nserver: nullserver\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s", status,
                     (int)strlen(body), body);
    put(c, answer, n);
}

/* Tokens. */

static blob chunk_of(const char *event) {
    char chunk[1200];
    blob b;
    b.size = snprintf(chunk, sizeof chunk, "%x\r\n%s\r\n", (int)strlen(event), event);
    b.text = must(strdup(chunk));
    return b;
}

static blob token_event(int chat, const char *word, int last) {
    char event[1024];
    const char *reason = last ? "\"length\"" : "null";
    if (chat)
        snprintf(event, sizeof event,
                 "data: {\"id\":\"chatcmpl-8f2c61ab40d94e02a7c1\",\"object\":\"chat.completion.chunk\",\"created\":1764428400,"
                 "\"model\":\"null\",\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"%s\"},"
                 "\"logprobs\":null,\"finish_reason\":%s}],\"usage\":null}\n\n",
                 word, reason);
    else
        snprintf(event, sizeof event,
                 "data: {\"id\":\"cmpl-8f2c61ab40d94e02a7c1\",\"object\":\"text_completion\",\"created\":1764428400,"
                 "\"model\":\"null\",\"choices\":[{\"index\":0,\"text\":\"%s\",\"logprobs\":null,\"finish_reason\":%s,"
                 "\"stop_reason\":null}],\"usage\":null}\n\n",
                 word, reason);
    return chunk_of(event);
}

static int write_end(const conn *c, char *out) {
    int n = 0;
    if (c->usage) {
        char event[512];
        snprintf(event, sizeof event,
                 "data: {\"id\":\"cmpl-8f2c61ab40d94e02a7c1\",\"object\":\"%s\",\"created\":1764428400,\"model\":\"null\","
                 "\"choices\":[],\"usage\":{\"prompt_tokens\":%d,\"completion_tokens\":%d,\"total_tokens\":%d}}\n\n",
                 c->chat ? "chat.completion.chunk" : "text_completion", c->prompt_tokens, c->tokens,
                 c->prompt_tokens + c->tokens);
        n = sprintf(out, "%x\r\n%s\r\n", (int)strlen(event), event);
    }
    return n + sprintf(out + n, "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n");
}

static const char HEAD[] =
    "HTTP/1.1 200 OK\r\nserver: nullserver\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    "transfer-encoding: chunked\r\n\r\n";

/* Write the next `burst` tokens of a stream in one send(); return -1 when the connection is dead. */
static int emit(conn *c) {
    static char out[65536];
    int n = 0;
    i64 now = now_ns();
    if (!c->started) {
        memcpy(out, HEAD, sizeof HEAD - 1);
        n = sizeof HEAD - 1;
        c->started = 1;
    }
    for (int i = 0; i < c->burst && c->sent < c->tokens; i++) {
        if (c->sent)
            count(seen_itl, now - c->last);
        else
            count(seen_ttft, now - c->arrived);
        if (c->itl) count(seen_late, now - c->due);
        c->last = now;
        c->sent++;
        truth.tokens++;
        blob *b = &(c->sent == c->tokens ? last_event_of : event_of)[c->chat][c->sent % WORDS_N];
        memcpy(out + n, b->text, b->size);
        n += b->size;
    }
    if (c->sent < c->tokens) return put(c, out, n);
    n += write_end(c, out + n);
    c->active = 0;
    truth.live--;
    truth.done++;
    truth.last = now_ns();
    int alive = put(c, out, n);
    if (truth.done == set_expect) say("last\n");
    return alive;
}

/* Requests. */

static double query(const char *from, const char *to, const char *name, double otherwise) {
    int size = strlen(name);
    for (const char *p = from; p < to; p++)
        if ((p == from || p[-1] == '&') && !strncmp(p, name, size) && p[size] == '=') return atof(p + size + 1);
    return otherwise;
}

/* Given a body that ends in a zero, return where the value of a key begins, or NULL. */
static const char *value_of(const char *body, const char *key) {
    const char *p = strstr(body, key);
    if (!p || !(p = strchr(p + strlen(key), ':'))) return NULL;
    for (p++; *p == ' '; p++) {}
    return p;
}

static void start_stream(conn *c, const char *body, int chat) {
    const char *value;
    int words = 0;
    c->chat = chat;
    c->tokens = (value = value_of(body, "\"max_tokens\"")) ? atoi(value) : 16;
    if ((value = value_of(body, "\"max_completion_tokens\"")) && atoi(value) > 0) c->tokens = atoi(value);
    if (c->tokens < 1) c->tokens = 1;
    c->usage = (value = value_of(body, "\"include_usage\"")) && *value == 't';
    for (const char *p = body; *p; p++) words += *p == ' ' && p[1] != ' ';
    c->prompt_tokens = words ? words : 1;
    c->sent = c->started = 0;
    c->arrived = now_ns();
    c->itl = set_itl * 1e6;
    c->burst = set_burst;
    c->due = c->arrived + (i64)(set_ttft * 1e6);
    c->active = 1;
    truth.requests++;
    if (++truth.live > truth.max_live) truth.max_live = truth.live;
    if (!truth.first) {
        truth.first = c->arrived;
        say("first\n");
    }
    if (c->itl || set_ttft > 0)
        heap_push(c->fd);
    else
        flood[flood_n++] = c->fd;
}

static void put_stats(conn *c) {
    char body[2048];
    i64 now = now_ns();
    snprintf(body, sizeof body,
             "{\"tokens\":%ld,\"requests\":%ld,\"done\":%ld,\"aborted\":%ld,\"live\":%d,\"max_live\":%d,\"connections\":%ld,"
             "\"writes\":%ld,\"stalls\":%ld,\"bytes\":%ld,\"first_ns\":%ld,\"last_ns\":%ld,\"now_ns\":%ld,\"wall_s\":%.4f,"
             "\"cpu_s\":%.4f,\"ttft_p50\":%.3f,\"ttft_p99\":%.3f,\"itl_p50\":%.3f,\"itl_p99\":%.3f,\"late_p50\":%.3f,"
             "\"late_p99\":%.3f}",
             truth.tokens, truth.requests, truth.done, truth.aborted, truth.live, truth.max_live, truth.connections, truth.writes,
             truth.stalls, truth.bytes, truth.first, truth.last, now, (now - truth.since) / 1e9, cpu_s() - truth.cpu_before,
             quantile_ms(seen_ttft, .5), quantile_ms(seen_ttft, .99), quantile_ms(seen_itl, .5), quantile_ms(seen_itl, .99),
             quantile_ms(seen_late, .5), quantile_ms(seen_late, .99));
    put_json(c, "200 OK", body);
}

static int is(const char *path, int size, const char *name) {
    return size == (int)strlen(name) && !memcmp(path, name, size);
}

/* Answer one request; its head ends in an empty line, its body in a zero. */
static void answer(conn *c, const char *head, const char *body) {
    const char *path = strchr(head, ' '), *end = path ? strchr(path + 1, ' ') : NULL;
    if (!end) {
        drop(c);
        return;
    }
    path++;
    const char *mark = memchr(path, '?', end - path);
    const char *from = mark ? mark + 1 : end;
    int size = (mark ? mark : end) - path;
    int chat = is(path, size, "/v1/chat/completions");
    if (*head == 'P' && (chat || is(path, size, "/v1/completions"))) {
        const char *stream = value_of(body, "\"stream\"");
        if (stream && *stream == 't')
            start_stream(c, body, chat);
        else
            put_json(c, "400 Bad Request", "{\"error\":{\"message\":\"this server only streams\"}}");
    } else if (is(path, size, "/stats")) {
        put_stats(c);
    } else if (is(path, size, "/reset")) {
        reset();
        put_json(c, "200 OK", "{}");
    } else if (is(path, size, "/ctl")) {
        set_ttft = query(from, end, "ttft", set_ttft);
        set_itl = query(from, end, "itl", set_itl);
        set_burst = query(from, end, "burst", set_burst);
        set_burst = set_burst < 1 ? 1 : set_burst > BURST_MAX ? BURST_MAX : set_burst;
        set_expect = query(from, end, "expect", set_expect);
        put_json(c, "200 OK", "{}");
    } else if (is(path, size, "/v1/models")) {
        put_json(c, "200 OK",
                 "{\"object\":\"list\",\"data\":[{\"id\":\"null\",\"object\":\"model\",\"created\":1764428400,"
                 "\"owned_by\":\"null\",\"root\":\"null\",\"max_model_len\":8192}]}");
    } else if (is(path, size, "/health") || is(path, size, "/get_server_info") || is(path, size, "/server_info")) {
        put_json(c, "200 OK", "{}");
    } else {
        put_json(c, "404 Not Found", "{}");
    }
}

/* Take the chunks of a body together in place; return the bytes that they took up, or 0 if some are still to come. */
static int join_chunks(char *body, int size, int *joined) {
    char *at = body, *end = body + size, *line;
    *joined = 0;
    while (at < end && (line = memmem(at, end - at, "\r\n", 2))) {
        long n = strtol(at, NULL, 16);
        at = line + 2;
        if (n < 0 || n + 2 > end - at) return 0;
        if (!n) return at + 2 - body;
        memmove(body + *joined, at, n);
        *joined += n;
        at += n + 2;
    }
    return 0;
}

/* Answer what has come in whole, one request at a time. */
static void understand(conn *c) {
    int fd = c->fd;
    while (c->used && c->fd == fd && !c->active && c->in_len) {
        char *end = memmem(c->in, c->in_len, "\r\n\r\n", 4);
        if (!end) return;
        int head = end - c->in + 4, body = 0, chunked = 0, whole;
        for (char *p = c->in; p < end; p = (char *)memmem(p, end + 2 - p, "\r\n", 2) + 2) {
            if (!strncasecmp(p, "content-length:", 15)) body = atoi(p + 15);
            if (!strncasecmp(p, "transfer-encoding:", 18)) chunked = 1;
        }
        if (chunked) {
            char *copy = must(malloc(c->in_len - head + 1)); /* joined in a copy: the rest may be still to come */
            memcpy(copy, c->in + head, c->in_len - head);
            int taken = join_chunks(copy, c->in_len - head, &body);
            if (taken) {
                copy[body] = 0;
                answer(c, c->in, copy);
            }
            free(copy);
            if (!taken) return;
            whole = head + taken;
        } else {
            whole = head + body;
            if (body < 0 || c->in_len < whole) return;
            char after = c->in[whole]; /* there is always room for one byte more */
            c->in[whole] = 0;
            answer(c, c->in, c->in + head);
            if (c->used && c->fd == fd) c->in[whole] = after;
        }
        if (!c->used || c->fd != fd) return;
        memmove(c->in, c->in + whole, c->in_len - whole);
        c->in_len -= whole;
    }
}

static void accept_all(int listener) {
    for (;;) {
        int one = 1, fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0) return;
        if (fd >= CONNS_MAX) {
            close(fd);
            continue;
        }
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        conns[fd] = (conn){.fd = fd, .used = 1, .in_cap = 2 * READ_SIZE, .in = must(malloc(2 * READ_SIZE))};
        truth.connections++;
        struct epoll_event e = {.events = EPOLLIN, .data.fd = fd};
        epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &e);
    }
}

static void read_some(conn *c) {
    if (c->in_len + READ_SIZE + 1 > c->in_cap) {
        c->in_cap *= 2;
        c->in = must(realloc(c->in, c->in_cap));
    }
    ssize_t n = recv(c->fd, c->in + c->in_len, c->in_cap - c->in_len - 1, 0);
    if (n == 0 || (n < 0 && errno != EAGAIN)) {
        drop(c);
    } else if (n > 0) {
        c->in_len += n;
        understand(c);
    }
}

static void write_what_is_due(void) {
    i64 now = now_ns();
    for (int done = 0; heap_n && conns[heap[0]].due <= now && done < 4096; done++) {
        int fd = heap[0];
        conn *c = &conns[fd];
        heap_pop();
        if (!c->itl) { /* its TTFT is over; from here on it is a flood */
            flood[flood_n++] = fd;
            continue;
        }
        if (emit(c) >= 0) {
            if (c->active) {
                c->due += c->itl * c->burst;
                heap_push(fd);
            } else {
                understand(c);
            }
        }
        if (done % 64 == 63) now = now_ns();
    }
}

static void write_floods(void) {
    for (int i = flood_n - 1; i >= 0; i--) {
        conn *c = &conns[flood[i]];
        if (c->out_len || emit(c) < 0 || c->active) continue;
        forget_stream(c->fd);
        understand(c);
    }
}

/* How long nothing is to be done; NULL is for ever. */
static struct timespec *pause_of(struct timespec *pause) {
    *pause = (struct timespec){0, 0};
    for (int i = 0; i < flood_n; i++)
        if (!conns[flood[i]].out_len) return pause;
    if (!heap_n) return NULL;
    i64 ns = conns[heap[0]].due - now_ns();
    if (ns > 0) *pause = (struct timespec){ns / 1000000000, ns % 1000000000};
    return pause;
}

static int listen_on(int port) {
    int one = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof a;
    char line[32];
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (fd < 0 || bind(fd, (void *)&a, size) || listen(fd, 4096) || getsockname(fd, (void *)&a, &size)) {
        perror("nullserver");
        exit(1);
    }
    snprintf(line, sizeof line, "ready %d\n", ntohs(a.sin_port));
    say(line);
    return fd;
}

int main(int argc, char **argv) {
    static struct epoll_event events[1024];
    struct timespec pause;
    signal(SIGPIPE, SIG_IGN);
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    prctl(PR_SET_TIMERSLACK, 1000UL); /* ns */
    for (int chat = 0; chat < 2; chat++)
        for (int w = 0; w < WORDS_N; w++) {
            event_of[chat][w] = token_event(chat, WORDS[w], 0);
            last_event_of[chat][w] = token_event(chat, WORDS[w], 1);
        }
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    reset();
    int listener = listen_on(argc > 1 ? atoi(argv[1]) : 0);
    struct epoll_event e = {.events = EPOLLIN, .data.fd = listener};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, listener, &e);
    for (;;) {
        int n = epoll_pwait2(epoll_fd, events, 1024, pause_of(&pause), NULL);
        for (int i = 0; i < n; i++) {
            int fd = events[i].data.fd;
            conn *c = &conns[fd];
            if (fd == listener)
                accept_all(listener);
            else if (!c->used)
                continue;
            else if (events[i].events & (EPOLLERR | EPOLLHUP))
                drop(c);
            else if ((!(events[i].events & EPOLLOUT) || flush(c) >= 0) && events[i].events & EPOLLIN)
                read_some(c);
        }
        write_what_is_due();
        write_floods();
    }
}
