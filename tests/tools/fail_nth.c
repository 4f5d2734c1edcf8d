/* fail_nth.c - LD_PRELOAD: the Nth call of one function fails, in forebay alone and not in its children.
 *
 * FAIL_NTH=FUNCTION:N, of malloc, calloc, realloc, aligned_alloc, mmap (anonymous ones), pthread_create; N from 1, counted from
 * the start of main.  FAIL_NTH=count:PATH appends "host FUNCTION calls" for each at exit. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t), *__libc_memalign(size_t, size_t);

enum { MALLOC, CALLOC, REALLOC, ALIGNED_ALLOC, MMAP, PTHREAD_CREATE, COUNT };
static const char *const names[] = { "malloc", "calloc", "realloc", "aligned_alloc", "mmap", "pthread_create" };
static unsigned long n_call[COUNT], fail_at[COUNT];
static int ready, failed;
static const char *count_path;

/* OpenBLAS does not look at what its malloc returns: a call of its own is let through, and the next one fails. */
static int is_unchecked(void *caller)
{
    Dl_info where;
    return dladdr(caller, &where) && where.dli_fname && strstr(where.dli_fname, "openblas");
}

static int fails(int what, void *caller)
{
    if (!ready)
        return 0;
    if (__atomic_add_fetch(&n_call[what], 1, __ATOMIC_RELAXED) < fail_at[what] || !fail_at[what]
        || __atomic_load_n(&failed, __ATOMIC_RELAXED) || is_unchecked(caller))
        return 0;
    return !__atomic_exchange_n(&failed, 1, __ATOMIC_RELAXED);
}

static void *out_of_memory(void)
{
    errno = ENOMEM;
    return NULL;
}

void *malloc(size_t size)
{
    return fails(MALLOC, __builtin_return_address(0)) ? out_of_memory() : __libc_malloc(size);
}

void *calloc(size_t n, size_t size)
{
    return fails(CALLOC, __builtin_return_address(0)) ? out_of_memory() : __libc_calloc(n, size);
}

void *realloc(void *old, size_t size)
{
    return fails(REALLOC, __builtin_return_address(0)) ? out_of_memory() : __libc_realloc(old, size);
}

void *aligned_alloc(size_t align, size_t size)
{
    return fails(ALIGNED_ALLOC, __builtin_return_address(0)) ? out_of_memory() : __libc_memalign(align, size);
}

void *mmap(void *at, size_t size, int protection, int flags, int fd, off_t offset)
{
    if ((flags & MAP_ANONYMOUS) && fails(MMAP, __builtin_return_address(0))) {
        errno = ENOMEM;
        return MAP_FAILED;
    }
    return (void *)syscall(SYS_mmap, at, size, protection, flags, fd, offset);
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*fn)(void *), void *arg)
{
    if (fails(PTHREAD_CREATE, __builtin_return_address(0)))
        return EAGAIN;
    int (*create)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *); /* looked up here: libraries start threads too */
    *(void **)&create = dlsym(RTLD_NEXT, "pthread_create");
    return create(thread, attributes, fn, arg);
}

__attribute__((constructor)) static void start(void)
{
    const char *spec = getenv("FAIL_NTH");
    if (!spec || strcmp(program_invocation_short_name, "forebay"))
        return;
    if (!strncmp(spec, "count:", 6))
        count_path = spec + 6;
    for (int i = 0; i < COUNT; i++) {
        size_t n = strlen(names[i]);
        if (!strncmp(spec, names[i], n) && spec[n] == ':')
            fail_at[i] = strtoul(spec + n + 1, NULL, 10);
    }
    ready = 1;
}

__attribute__((destructor)) static void end(void)
{
    ready = 0;
    FILE *to = count_path ? fopen(count_path, "a") : NULL;
    for (int i = 0; to && i < COUNT; i++)
        fprintf(to, "host %s %lu\n", names[i], n_call[i]);
    if (to)
        fclose(to);
}
