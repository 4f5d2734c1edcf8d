#include "sched/block.h"

#include <assert.h>

#define BIT(state) (1u << (state))

static const uint8_t device_moves[] = {
    [FB_BLOCK_HOST]        = BIT(FB_BLOCK_PREFETCHING),
    [FB_BLOCK_PREFETCHING] = BIT(FB_BLOCK_RESIDENT),
    [FB_BLOCK_RESIDENT]    = BIT(FB_BLOCK_COMPUTING) | BIT(FB_BLOCK_RELEASED),
    [FB_BLOCK_COMPUTING]   = BIT(FB_BLOCK_RESIDENT),
    [FB_BLOCK_RELEASED]    = BIT(FB_BLOCK_HOST),
};
static_assert(FB_COUNT(device_moves) == FB_BLOCK_STATE_COUNT, "a device state without a row");

static const uint8_t host_moves[] = {
    [FB_STATE_CLEAN]    = BIT(FB_STATE_LANDING),
    [FB_STATE_LANDING]  = BIT(FB_STATE_PENDING) | BIT(FB_STATE_UPDATING),
    [FB_STATE_PENDING]  = BIT(FB_STATE_UPDATING) | BIT(FB_STATE_CLEAN),
    [FB_STATE_UPDATING] = BIT(FB_STATE_CLEAN),
};
static_assert(FB_COUNT(host_moves) == FB_STATE_COUNT, "a host state without a row");

static void move(uint8_t *state, unsigned to, const uint8_t *moves, unsigned count)
{
    assert(to < count);
    assert(moves[*state] >> to & 1u);
    __atomic_store_n(state, (uint8_t)to, __ATOMIC_RELAXED); /* reports read it from another thread */
}

void fb_block_move(uint8_t *state, fb_block_state to)
{
    move(state, to, device_moves, FB_BLOCK_STATE_COUNT);
}

void fb_host_block_move(uint8_t *state, fb_host_block_state to)
{
    move(state, to, host_moves, FB_STATE_COUNT);
}

#define STATE_NAME(name) #name,

const char *fb_block_state_str(uint8_t state)
{
    static const char *const names[] = { FB_DEVICE_STATE_MAP(STATE_NAME) };
    return state < FB_COUNT(names) ? names[state] : "?";
}

const char *fb_host_block_state_str(uint8_t state)
{
    static const char *const names[] = { FB_HOST_STATE_MAP(STATE_NAME) };
    return state < FB_COUNT(names) ? names[state] : "?";
}
