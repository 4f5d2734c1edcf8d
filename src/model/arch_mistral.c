/* arch_mistral.c - the mistral family: Mistral.
 * Source: transformers 5.17, models/mistral.  No biases anywhere; sliding_window, unless null, holds in every layer. */
#include "model/arch.h"

#include "base/error.h"

static const fb_weight_desc mistral_embed[] = {
    { "model.embed_tokens.weight",       FB_ROLE_EMBED,     FB_D_VOCAB,  FB_D_HIDDEN, FB_IF_ALWAYS, 0 },
};

static const fb_weight_desc mistral_layer[] = {
    { "input_layernorm.weight",          FB_ROLE_ATTN_NORM, FB_D_HIDDEN, FB_D_ONE,    FB_IF_ALWAYS, FB_P_NO_DECAY },
    { "self_attn.q_proj.weight",         FB_ROLE_Q,         FB_D_Q,      FB_D_HIDDEN, FB_IF_ALWAYS, 0 },
    { "self_attn.k_proj.weight",         FB_ROLE_K,         FB_D_KV,     FB_D_HIDDEN, FB_IF_ALWAYS, FB_P_JOIN },
    { "self_attn.v_proj.weight",         FB_ROLE_V,         FB_D_KV,     FB_D_HIDDEN, FB_IF_ALWAYS, FB_P_JOIN },
    { "self_attn.o_proj.weight",         FB_ROLE_O,         FB_D_HIDDEN, FB_D_Q,      FB_IF_ALWAYS, 0 },
    { "post_attention_layernorm.weight", FB_ROLE_MLP_NORM,  FB_D_HIDDEN, FB_D_ONE,    FB_IF_ALWAYS, FB_P_NO_DECAY },
    { "mlp.gate_proj.weight",            FB_ROLE_GATE,      FB_D_FFN,    FB_D_HIDDEN, FB_IF_ALWAYS, 0 },
    { "mlp.up_proj.weight",              FB_ROLE_UP,        FB_D_FFN,    FB_D_HIDDEN, FB_IF_ALWAYS, FB_P_JOIN },
    { "mlp.down_proj.weight",            FB_ROLE_DOWN,      FB_D_HIDDEN, FB_D_FFN,    FB_IF_ALWAYS, 0 },
};

static const fb_weight_desc mistral_final[] = {
    { "model.norm.weight",               FB_ROLE_FINAL_NORM, FB_D_HIDDEN, FB_D_ONE,    FB_IF_ALWAYS, FB_P_NO_DECAY },
    { "lm_head.weight",                  FB_ROLE_HEAD,      FB_D_VOCAB,  FB_D_HIDDEN, FB_IF_UNTIED, 0 },
};

const fb_arch fb_arch_mistral = {
    .model_type = "mistral", .hf_name = "MistralForCausalLM", .layer_prefix = "model.layers.%u.",
    .embed = mistral_embed, .n_embed = FB_COUNT(mistral_embed),
    .layer = mistral_layer, .n_layer = FB_COUNT(mistral_layer),
    .final = mistral_final, .n_final = FB_COUNT(mistral_final),
    .has_window = true, .window_default = 4096,
    .n_kv_head_default = 8, .bos_default = 1, .eos_default = 2,
    .rope_theta_default = 1e4, .norm_eps_default = 1e-6,
};
