#include "model/arch.h"

#include "base/error.h"

#include <assert.h>
#include <stdio.h>

extern const fb_arch fb_arch_llama, fb_arch_mistral, fb_arch_qwen2, fb_arch_qwen3;

static const fb_arch *const registry[] = { &fb_arch_llama, &fb_arch_mistral, &fb_arch_qwen2, &fb_arch_qwen3 };

const fb_arch *fb_arch_find(const char *model_type)
{
    for (size_t i = 0; i < FB_COUNT(registry); i++)
        if (strcmp(registry[i]->model_type, model_type) == 0)
            return registry[i];
    return NULL;
}

void fb_arch_names(char *buf, size_t size)
{
    size_t used = 0;
    assert(size > 0);
    buf[0] = '\0';
    for (size_t i = 0; i < FB_COUNT(registry) && used < size; i++)
        used += (size_t)snprintf(buf + used, size - used, "%s%s", i ? ", " : "", registry[i]->model_type);
}

uint64_t fb_dim_size(const fb_model_config *c, fb_dim d)
{
    switch (d) {
    case FB_D_ONE:    return 1;
    case FB_D_HIDDEN: return c->hidden;
    case FB_D_Q:      return (uint64_t)c->n_head * c->head_dim;
    case FB_D_KV:     return (uint64_t)c->n_kv_head * c->head_dim;
    case FB_D_HEAD:   return c->head_dim;
    case FB_D_FFN:    return c->ffn_dim;
    case FB_D_VOCAB:  return c->vocab;
    }
    assert(!"a dimension without a size");
    return 0;
}

bool fb_weight_present(const fb_model_config *c, fb_presence when)
{
    switch (when) {
    case FB_IF_ALWAYS:   return true;
    case FB_IF_QKV_BIAS: return c->qkv_bias;
    case FB_IF_O_BIAS:   return c->o_bias;
    case FB_IF_MLP_BIAS: return c->mlp_bias;
    case FB_IF_QK_NORM:  return c->qk_norm;
    case FB_IF_UNTIED:   return !c->tied;
    }
    assert(!"a presence without a rule");
    return false;
}

const char *fb_role_str(fb_role r)
{
    static const char *const names[FB_ROLE_COUNT] = {
        [FB_ROLE_EMBED] = "embed",
        [FB_ROLE_ATTN_NORM] = "attn_norm", [FB_ROLE_Q] = "q", [FB_ROLE_K] = "k", [FB_ROLE_V] = "v",
        [FB_ROLE_Q_BIAS] = "q_bias", [FB_ROLE_K_BIAS] = "k_bias", [FB_ROLE_V_BIAS] = "v_bias",
        [FB_ROLE_Q_NORM] = "q_norm", [FB_ROLE_K_NORM] = "k_norm", [FB_ROLE_O] = "o", [FB_ROLE_O_BIAS] = "o_bias",
        [FB_ROLE_MLP_NORM] = "mlp_norm", [FB_ROLE_GATE] = "gate", [FB_ROLE_UP] = "up",
        [FB_ROLE_GATE_BIAS] = "gate_bias", [FB_ROLE_UP_BIAS] = "up_bias", [FB_ROLE_DOWN] = "down",
        [FB_ROLE_DOWN_BIAS] = "down_bias", [FB_ROLE_FINAL_NORM] = "final_norm", [FB_ROLE_HEAD] = "head",
    };
    assert((unsigned)r < FB_ROLE_COUNT);
    return names[r];
}
