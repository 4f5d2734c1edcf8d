/* test_kit.h - what the tests of the core share: random numbers, and the proof that a promise is asserted.
 * Include after cmocka.h. */
#ifndef FB_TEST_KIT_H
#define FB_TEST_KIT_H

#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

/* Under a sanitizer everything takes ten times as long: sweeps then take a part of their settings. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { SANITIZED = 1 };
#else
enum { SANITIZED = 0 };
#endif

/* splitmix64 (Steele, Lea, Flood 2014): the same data on every machine. */
static inline uint64_t random_bits(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static inline uint32_t random_under(uint64_t *state, uint32_t n)
{
    return (uint32_t)(random_bits(state) % n);
}

static inline double random_real(uint64_t *state) /* -1..1 */
{
    return (double)(int64_t)random_bits(state) * 0x1p-63;
}

/* Whether fn ends in abort(), as a failed assert does.  Runs in a child, so call it while no other thread runs. */
static inline bool aborts(void (*fn)(void *ctx), void *ctx)
{
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        int nowhere = open("/dev/null", O_WRONLY);
        dup2(nowhere, STDERR_FILENO);
        signal(SIGABRT, SIG_DFL);
        fn(ctx);
        _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}

#endif
