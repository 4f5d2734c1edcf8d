#include "base/memory.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

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

/* The names of the same things in the two versions of cgroups. */
typedef struct group_files {
    const char *limit, *used, *cache[2];
} group_files;

static const group_files version_1 = { "memory.limit_in_bytes", "memory.usage_in_bytes", { "total_inactive_file", "total_active_file" } };
static const group_files version_2 = { "memory.max", "memory.current", { "inactive_file", "active_file" } };

/* The room under the limits of a group and of its parents. */
static uint64_t group_room(const char *root, const char *group, const group_files *files)
{
    char dir[4224];
    uint64_t room = UINT64_MAX, limit, used;
    snprintf(dir, sizeof dir, "%s%s", root, group);
    while (strlen(dir) >= strlen(root)) {
        if (read_number(dir, files->limit, &limit) && read_number(dir, files->used, &used)) {
            uint64_t cache = reclaimable(dir, files->cache);
            used -= cache < used ? cache : used;
            uint64_t here = limit > used ? limit - used : 0;
            room = here < room ? here : room;
        }
        char *slash = strrchr(dir, '/');
        if (!slash)
            break;
        *slash = 0;
    }
    return room;
}

uint64_t fb_memory_available(void)
{
    uint64_t available = proc_kib("/proc/meminfo", "MemAvailable");
    if (!available)
        return 0;
    char line[4200];
    FILE *f = fopen("/proc/self/cgroup", "re");
    while (f && fgets(line, sizeof line, f)) {
        line[strcspn(line, "\n")] = 0;
        uint64_t room = UINT64_MAX;
        char *memory = strstr(line, ":memory:");
        if (!strncmp(line, "0::", 3))
            room = group_room("/sys/fs/cgroup", line + 3, &version_2);
        else if (memory)
            room = group_room("/sys/fs/cgroup/memory", memory + 8, &version_1);
        available = room < available ? room : available;
    }
    if (f)
        fclose(f);
    return available;
}

uint64_t fb_memory_resident(void)
{
    return proc_kib("/proc/self/status", "RssAnon");
}
