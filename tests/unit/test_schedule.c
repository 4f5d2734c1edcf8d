/* The list of visits against its definition, and the choice of a slot against the best that any choice could do. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "sched/schedule.h"

enum { LAYERS_MAX = 9, VISITS_MAX = 2 * LAYERS_MAX + 3 };

static bool touches(const fb_visit *v, uint32_t layer)
{
    return (v->kind == FB_VISIT_FORWARD || v->kind == FB_VISIT_BACKWARD) && v->layer == layer;
}

static void visits_go_up_and_come_back(void **unused)
{
    (void)unused;
    for (uint32_t l = 1; l <= LAYERS_MAX; l++) {
        fb_visit v[VISITS_MAX];
        assert_int_equal(fb_schedule_build(v, l, true), 2 * l + 3);
        assert_int_equal(v[0].kind, FB_VISIT_EMBED);
        assert_int_equal(v[l + 1].kind, FB_VISIT_HEAD);
        assert_int_equal(v[2 * l + 2].kind, FB_VISIT_EMBED_BACKWARD);
        for (uint32_t i = 0; i < l; i++) {
            assert_int_equal(v[1 + i].kind, FB_VISIT_FORWARD);
            assert_int_equal(v[1 + i].layer, i);
            assert_int_equal(v[l + 2 + i].kind, FB_VISIT_BACKWARD);
            assert_int_equal(v[l + 2 + i].layer, l - 1 - i);
        }
        assert_int_equal(fb_schedule_build(v, l, false), l + 2);
        assert_int_equal(v[l + 1].kind, FB_VISIT_HEAD);
    }
}

/* next is the first index after this one, the list going round, that visits the layer again. */
static void every_visit_knows_the_next(void **unused)
{
    (void)unused;
    for (uint32_t l = 1; l <= LAYERS_MAX; l++)
        for (int backward = 0; backward < 2; backward++) {
            fb_visit v[VISITS_MAX];
            uint32_t n = fb_schedule_build(v, l, backward);
            for (uint32_t i = 0; i < n; i++) {
                uint32_t next = FB_NEVER;
                for (uint32_t q = i + 1; q <= i + n && next == FB_NEVER; q++)
                    if (touches(&v[i], v[i].layer) && touches(&v[q % n], v[i].layer))
                        next = q;
                assert_int_equal(v[i].next, next);
            }
        }
}

static void finds_layers_and_empty_slots(void **unused)
{
    (void)unused;
    fb_slot s[3] = { { 4, 9 }, { FB_NEVER, 0 }, { 2, 11 } };
    assert_int_equal(fb_slots_find(s, 3, 4), 0);
    assert_int_equal(fb_slots_find(s, 3, 2), 2);
    assert_int_equal(fb_slots_find(s, 3, 3), FB_NEVER);
    assert_int_equal(fb_slots_victim(s, 3, 5), 1);
    s[1] = (fb_slot){ 3, 5 };
    assert_int_equal(fb_slots_victim(s, 3, 5), 2);
    assert_int_equal(fb_slots_victim(s, 3, 10), 2);
    assert_int_equal(fb_slots_victim(s, 3, 11), FB_NEVER); /* all are wanted sooner, or just then */
}

/* Loads that a run over `n_pass` passes needs when every choice is tried. */
static uint32_t fewest_loads(const uint32_t *want, uint32_t n, uint32_t at, uint32_t *slots, uint32_t n_slot)
{
    for (; at < n; at++) {
        bool there = false;
        for (uint32_t i = 0; i < n_slot; i++)
            there |= slots[i] == want[at];
        if (there)
            continue;
        uint32_t best = UINT32_MAX;
        for (uint32_t i = 0; i < n_slot; i++) {
            uint32_t old = slots[i], copy[LAYERS_MAX];
            slots[i] = want[at];
            memcpy(copy, slots, n_slot * sizeof *copy);
            uint32_t loads = 1 + fewest_loads(want, n, at + 1, copy, n_slot);
            best = loads < best ? loads : best;
            slots[i] = old;
            if (old == FB_NEVER)
                break;
        }
        return best;
    }
    return 0;
}

static uint32_t loads_of_victim(const fb_visit *v, uint32_t n, uint32_t n_pass, uint32_t n_slot)
{
    fb_slot slots[LAYERS_MAX];
    uint32_t loads = 0;
    for (uint32_t i = 0; i < n_slot; i++)
        slots[i] = (fb_slot){ FB_NEVER, 0 };
    for (uint32_t at = 0; at < n * n_pass; at++) {
        const fb_visit *visit = &v[at % n];
        if (visit->kind != FB_VISIT_FORWARD && visit->kind != FB_VISIT_BACKWARD)
            continue;
        uint32_t s = fb_slots_find(slots, n_slot, visit->layer);
        if (s == FB_NEVER) {
            s = fb_slots_victim(slots, n_slot, at);
            assert_int_not_equal(s, FB_NEVER);
            loads++;
        }
        slots[s] = (fb_slot){ visit->layer, visit->next + at / n * n };
    }
    return loads;
}

static void no_choice_of_slots_loads_less(void **unused)
{
    (void)unused;
    for (uint32_t l = 1; l <= 4; l++)
        for (uint32_t n_slot = 1; n_slot <= l; n_slot++)
            for (uint32_t n_pass = 1; n_pass <= 2; n_pass++) {
                fb_visit v[VISITS_MAX];
                uint32_t n = fb_schedule_build(v, l, true), want[2 * VISITS_MAX], n_want = 0, empty[LAYERS_MAX];
                for (uint32_t at = 0; at < n * n_pass; at++)
                    if (v[at % n].kind == FB_VISIT_FORWARD || v[at % n].kind == FB_VISIT_BACKWARD)
                        want[n_want++] = v[at % n].layer;
                for (uint32_t i = 0; i < n_slot; i++)
                    empty[i] = FB_NEVER;
                assert_int_equal(loads_of_victim(v, n, n_pass, n_slot), fewest_loads(want, n_want, 0, empty, n_slot));
            }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(visits_go_up_and_come_back),
        cmocka_unit_test(every_visit_knows_the_next),
        cmocka_unit_test(finds_layers_and_empty_slots),
        cmocka_unit_test(no_choice_of_slots_loads_less),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
