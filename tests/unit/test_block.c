/* Every pair of states, against the two drawings of sched/block.h written out as pairs. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "sched/block.h"
#include "test_kit.h"

typedef struct step {
    uint8_t from, to;
    void (*move)(uint8_t *state, unsigned to);
} step;

static void move_device(uint8_t *state, unsigned to)
{
    fb_block_move(state, (fb_block_state)to);
}

static void move_host(uint8_t *state, unsigned to)
{
    fb_host_block_move(state, (fb_host_block_state)to);
}

static void make(void *ctx)
{
    step *s = ctx;
    s->move(&s->from, s->to);
    if (s->from != s->to)
        _exit(1);
}

static bool drawn(const uint8_t (*arrows)[2], size_t n, uint8_t from, uint8_t to)
{
    for (size_t i = 0; i < n; i++)
        if (arrows[i][0] == from && arrows[i][1] == to)
            return true;
    return false;
}

static void check(const uint8_t (*arrows)[2], size_t n, uint8_t count, void (*move)(uint8_t *, unsigned))
{
    for (uint8_t from = 0; from < count; from++)
        for (uint8_t to = 0; to <= count; to++) { /* count itself is no state */
            step s = { from, to, move };
            if (aborts(make, &s) == drawn(arrows, n, from, to))
                fail_msg("%u -> %u is %s", from, to, drawn(arrows, n, from, to) ? "refused" : "let through");
        }
    for (size_t i = 0; i < n; i++) {
        uint8_t state = arrows[i][0];
        move(&state, arrows[i][1]);
        assert_int_equal(state, arrows[i][1]);
    }
}

static void device_moves_are_the_drawing(void **unused)
{
    (void)unused;
    static const uint8_t arrows[][2] = {
        { FB_BLOCK_HOST, FB_BLOCK_PREFETCHING }, { FB_BLOCK_PREFETCHING, FB_BLOCK_RESIDENT },
        { FB_BLOCK_RESIDENT, FB_BLOCK_COMPUTING }, { FB_BLOCK_COMPUTING, FB_BLOCK_RESIDENT },
        { FB_BLOCK_RESIDENT, FB_BLOCK_RELEASED }, { FB_BLOCK_RELEASED, FB_BLOCK_HOST },
    };
    check(arrows, FB_COUNT(arrows), FB_BLOCK_STATE_COUNT, move_device);
}

static void host_moves_are_the_drawing(void **unused)
{
    (void)unused;
    static const uint8_t arrows[][2] = {
        { FB_STATE_CLEAN, FB_STATE_LANDING }, { FB_STATE_LANDING, FB_STATE_PENDING }, { FB_STATE_PENDING, FB_STATE_UPDATING },
        { FB_STATE_UPDATING, FB_STATE_CLEAN }, { FB_STATE_PENDING, FB_STATE_CLEAN }, { FB_STATE_LANDING, FB_STATE_UPDATING },
    };
    check(arrows, FB_COUNT(arrows), FB_STATE_COUNT, move_host);
}

static void states_have_names(void **unused)
{
    (void)unused;
    assert_string_equal(fb_block_state_str(FB_BLOCK_HOST), "HOST");
    assert_string_equal(fb_block_state_str(FB_BLOCK_RELEASED), "RELEASED");
    assert_string_equal(fb_block_state_str(FB_BLOCK_STATE_COUNT), "?");
    assert_string_equal(fb_host_block_state_str(FB_STATE_CLEAN), "CLEAN");
    assert_string_equal(fb_host_block_state_str(FB_STATE_UPDATING), "UPDATING");
    assert_string_equal(fb_host_block_state_str(255), "?");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(device_moves_are_the_drawing),
        cmocka_unit_test(host_moves_are_the_drawing),
        cmocka_unit_test(states_have_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
