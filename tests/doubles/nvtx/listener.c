/*
 * An NVTX tool for tests: it writes down every call that a program makes.
 *
 * The program's NVTX library loads the file named by NVTX_INJECTION64_PATH at its first call and asks
 * InitializeInjectionNvtx2 to fill in its tables of functions. The numbers of tables and slots below
 * are NVTX version 3's binary interface, so no NVIDIA header is needed. Each call becomes one line of
 * the file named by LISTENER_FILE, its fields parted by tabs:
 *
 *     verb  process  thread  domain  number  category  colour  payload type  payload  message
 *
 * The number is a range's id, or a category's where the verb names one. A line is one write to a file
 * opened for appending: threads, forks and killed processes never mix or lose theirs.
 *
 * Built with -DSILENT it fills in the same functions and writes nothing: a tool that costs nothing,
 * for benchmarks. Built with -DREFUSES it does as old versions of Nsight Systems do under a new nvtx:
 * it offers NVTX's extensions and then refuses them, so every domain counts as switched off.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { EXPORT_CALLBACKS = 1 };
enum { TABLE_CORE = 1, TABLE_DOMAINS = 5 };
enum { SLOT_PLAIN_PUSH = 9, SLOT_PLAIN_POP = 11 };
enum {
    SLOT_MARK = 1,
    SLOT_START = 2,
    SLOT_END = 3,
    SLOT_PUSH = 4,
    SLOT_POP = 5,
    SLOT_CATEGORY = 8,
    SLOT_REGISTER = 10,
    SLOT_CREATE = 12
};
enum { MESSAGE_ASCII = 1, MESSAGE_REGISTERED = 3 };

struct event {
    uint16_t version;
    uint16_t size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type;
    int32_t reserved;
    int64_t payload;
    int32_t message_type;
    const char *message;
};

typedef void (*any_function)(void);

struct callbacks {
    size_t size;
    int (*table)(int number, any_function ***slots, unsigned *count);
};

/* Domains and registered strings are handles of the tool's own choice: here, their names. */
typedef char *handle;

#ifdef SILENT
static const int silent = 1;
#else
static const int silent = 0;
#endif
static const struct event nothing;
static int out = -1;
static uint64_t started;

static void put(const char *verb, const char *domain, long long number, const struct event *event,
                const char *message)
{
    char line[1024];
    int length;

    if (silent)
        return;
    length = snprintf(line, sizeof line, "%s\t%d\t%ld\t%s\t%lld\t%u\t%u\t%d\t%lld\t%s\n", verb,
                      (int)getpid(), (long)syscall(SYS_gettid), domain ? domain : "", number,
                      event->category, event->color, event->payload_type,
                      (long long)event->payload, message ? message : "");
    if (write(out, line, (size_t)length) != length)
        abort();
}

static void put_event(const char *verb, handle domain, long long number, const struct event *event)
{
    int known = event->message_type == MESSAGE_ASCII || event->message_type == MESSAGE_REGISTERED;
    put(verb, domain, number, event, known ? event->message : "?");
}

static handle create(const char *name)
{
    put("create", name, 0, &nothing, NULL);
    return strdup(name);
}

static void category(handle domain, uint32_t number, const char *name)
{
    put("category", domain, number, &nothing, name);
}

static handle remember(handle domain, const char *string)
{
    put("register", domain, 0, &nothing, string);
    return strdup(string);
}

static void mark(handle domain, const struct event *event)
{
    put_event("mark", domain, 0, event);
}

static uint64_t start(handle domain, const struct event *event)
{
    uint64_t number = __sync_add_and_fetch(&started, 1);
    put_event("start", domain, (long long)number, event);
    return number;
}

static void end(handle domain, uint64_t number)
{
    put("end", domain, (long long)number, &nothing, NULL);
}

static int push(handle domain, const struct event *event)
{
    put_event("push", domain, 0, event);
    return 0;
}

static int pop(handle domain)
{
    put("pop", domain, 0, &nothing, NULL);
    return 0;
}

static int plain_push(const char *message)
{
    put("push", NULL, 0, &nothing, message);
    return 0;
}

static int plain_pop(void)
{
    return pop(NULL);
}

static void fill(any_function **slots, unsigned count, unsigned slot, any_function function)
{
    if (slot < count)
        *slots[slot] = function;
}

static int opened(void)
{
    const char *path = getenv("LISTENER_FILE");
    if (path)
        out = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    return out >= 0;
}

__attribute__((visibility("default"))) int
InitializeInjectionNvtx2(const void *(*export_table)(uint32_t))
{
    const struct callbacks *callbacks = export_table(EXPORT_CALLBACKS);
    any_function **slots;
    unsigned count;

    if (!callbacks || callbacks->size < sizeof *callbacks)
        return 0;
    if (!silent && !opened())
        return 0;
    if (callbacks->table(TABLE_CORE, &slots, &count)) {
        fill(slots, count, SLOT_PLAIN_PUSH, (any_function)plain_push);
        fill(slots, count, SLOT_PLAIN_POP, (any_function)plain_pop);
    }
    if (callbacks->table(TABLE_DOMAINS, &slots, &count)) {
        fill(slots, count, SLOT_MARK, (any_function)mark);
        fill(slots, count, SLOT_START, (any_function)start);
        fill(slots, count, SLOT_END, (any_function)end);
        fill(slots, count, SLOT_PUSH, (any_function)push);
        fill(slots, count, SLOT_POP, (any_function)pop);
        fill(slots, count, SLOT_CATEGORY, (any_function)category);
        fill(slots, count, SLOT_REGISTER, (any_function)remember);
        fill(slots, count, SLOT_CREATE, (any_function)create);
    }
    return 1;
}

#ifdef REFUSES
__attribute__((visibility("default"))) int InitializeInjectionNvtxExtension(void *module)
{
    (void)module;
    return 0;
}
#endif
