#include "base/memory.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

static const uint64_t UNSEEN_BYTES = 16u << 20;

/* "KEY:   123 kB" of a /proc file, in bytes; 0 when absent. */
static uint64_t proc_kib(const char *path, const char *key)
{
    char line[256];
    unsigned long long kib = 0;
    FILE *f = fopen(path, "re");
    if (!f)
        return 0;
    while (fgets(line, sizeof line, f))
        if (!strncmp(line, key, strlen(key)) && line[strlen(key)] == ':' && sscanf(line + strlen(key) + 1, "%llu", &kib) == 1)
            break;
    fclose(f);
    return kib * 1024;
}

static bool read_number(const char *dir, const char *name, uint64_t *out)
{
    char path[4352];
    unsigned long long value;
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "re");
    if (!f)
        return false;
    bool ok = fscanf(f, "%llu", &value) == 1; /* "max" is no number: no limit */
    fclose(f);
    *out = value;
    return ok;
}

/* The files' pages that a group is charged for and gives back when memory is short: a checkpoint that was just read or
 * downloaded would otherwise count as taken.  Lines of memory.stat are "KEY 123", in bytes. */
static uint64_t reclaimable(const char *dir, const char *const keys[2])
{
    char path[4352], key[64];
    unsigned long long value, sum = 0;
    snprintf(path, sizeof path, "%s/memory.stat", dir);
    FILE *f = fopen(path, "re");
    if (!f)
        return 0;
    while (fscanf(f, "%63s %llu\n", key, &value) == 2)
        if (!strcmp(key, keys[0]) || !strcmp(key, keys[1]))
            sum += value;
    fclose(f);
    return sum;
}

/* The names of the same things in the two versions of cgroups.  high: where v2 begins to stall a process, which would run on
 * at a crawl: as good as a limit. */
typedef struct group_files {
    const char *limit, *high, *used, *cache[2];
} group_files;

static const group_files version_1 = { "memory.limit_in_bytes", NULL, "memory.usage_in_bytes",
                                       { "total_inactive_file", "total_active_file" } };
static const group_files version_2 = { "memory.max", "memory.high", "memory.current", { "inactive_file", "active_file" } };

/* A limit that leaves this much: the least is kept. */
static void consider(fb_memory_room *room, uint64_t left, const char *fmt, ...) FB_PRINTF(3, 4);

static void consider(fb_memory_room *room, uint64_t left, const char *fmt, ...)
{
    if (left >= room->bytes)
        return;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(room->limit, sizeof room->limit, fmt, ap);
    va_end(ap);
    room->bytes = left;
}

static uint64_t below(uint64_t limit, uint64_t used)
{
    return limit > used ? limit - used : 0;
}

/* The limits of a group and of its parents.  In a container the path may be the host's, unknown under this mount: its missing
 * folders are then passed over, and the mount's root, which is the container's own group, counts. */
static void consider_groups(fb_memory_room *room, const char *root, const char *group, const group_files *files)
{
    char dir[4224];
    size_t n_root = strlen(root);
    uint64_t limit, used;
    snprintf(dir, sizeof dir, "%s%s", root, group);
    while (strlen(dir) >= n_root) {
        if (read_number(dir, files->used, &used)) {
            uint64_t cache = reclaimable(dir, files->cache);
            const char *name = dir[n_root] ? dir + n_root : "/";
            used = below(used, cache);
            if (read_number(dir, files->limit, &limit))
                consider(room, below(limit, used), "cgroup %.100s (%s)", name, files->limit);
            if (files->high && read_number(dir, files->high, &limit))
                consider(room, below(limit, used), "cgroup %.100s (%s)", name, files->high);
        }
        char *slash = strrchr(dir, '/');
        if (!slash)
            break;
        *slash = 0;
    }
}

/* membership: the lines "id:controllers:path" of /proc/self/cgroup; no controllers means v2. */
static void consider_membership(fb_memory_room *room, const char *membership, const char *mount)
{
    char line[4200], v1_root[512];
    FILE *f = fopen(membership, "re");
    snprintf(v1_root, sizeof v1_root, "%s/memory", mount);
    while (f && fgets(line, sizeof line, f)) {
        line[strcspn(line, "\n")] = 0;
        const char *memory = strstr(line, ":memory:");
        if (!strncmp(line, "0::", 3))
            consider_groups(room, mount, line + 3, &version_2);
        else if (memory)
            consider_groups(room, v1_root, memory + 8, &version_1);
    }
    if (f)
        fclose(f);
}

/* The limits of the process itself, and the kernel's promise where it promises no more than it has. */
static void consider_process(fb_memory_room *room)
{
    struct rlimit r;
    unsigned policy = 0;
    if (getrlimit(RLIMIT_AS, &r) == 0 && r.rlim_cur != RLIM_INFINITY)
        consider(room, below(r.rlim_cur, proc_kib("/proc/self/status", "VmSize")), "the limit on address space (ulimit -v)");
    if (getrlimit(RLIMIT_DATA, &r) == 0 && r.rlim_cur != RLIM_INFINITY)
        consider(room, below(r.rlim_cur, proc_kib("/proc/self/status", "VmData")), "the limit on data (ulimit -d)");
    FILE *f = fopen("/proc/sys/vm/overcommit_memory", "re");
    bool strict = f && fscanf(f, "%u", &policy) == 1 && policy == 2;
    if (f)
        fclose(f);
    if (strict)
        consider(room, below(proc_kib("/proc/meminfo", "CommitLimit"), proc_kib("/proc/meminfo", "Committed_AS")),
                 "the kernel's commit limit (vm.overcommit_memory is 2)");
}

bool fb_memory_room_now(fb_memory_room *room)
{
    *room = (fb_memory_room){ .bytes = UINT64_MAX };
    uint64_t available = proc_kib("/proc/meminfo", "MemAvailable");
    if (!available)
        return false;
    consider(room, available, "this machine (MemAvailable)");
    consider_membership(room, "/proc/self/cgroup", "/sys/fs/cgroup");
    consider_process(room);
    return true;
}

uint64_t fb_memory_available(void)
{
    fb_memory_room room;
    return fb_memory_room_now(&room) ? room.bytes : 0;
}

uint64_t fb_memory_unseen(uint64_t bytes)
{
    return bytes / 256 + UNSEEN_BYTES;
}

uint64_t fb_memory_resident(void)
{
    return proc_kib("/proc/self/status", "RssAnon");
}
