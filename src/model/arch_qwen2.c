/* arch_qwen2.c - the qwen2 family: Qwen2, Qwen2.5.
 * Source: transformers 5.17, models/qwen2.  q, k and v are always biased, o never; a window counts only with
 * use_sliding_window, from layer max_window_layers on. */
#include "model/arch.h"

#include "base/error.h"

static const fb_weight_desc qwen2_embed[] = {
    { "model.embed_tokens.weight",       FB_ROLE_EMBED,     FB_D_VOCAB,  FB_D_HIDDEN, FB_IF_ALWAYS,   0 },
};

static const fb_weight_desc qwen2_layer[] = {
    { "input_layernorm.weight",          FB_ROLE_ATTN_NORM, FB_D_HIDDEN, FB_D_ONE,    FB_IF_ALWAYS,   FB_P_NO_DECAY },
    { "self_attn.q_proj.weight",         FB_ROLE_Q,         FB_D_Q,      FB_D_HIDDEN, FB_IF_ALWAYS,   0 },
    { "self_attn.k_proj.weight",         FB_ROLE_K,         FB_D_KV,     FB_D_HIDDEN, FB_IF_ALWAYS,   FB_P_JOIN },
    { "self_attn.v_proj.weight",         FB_ROLE_V,         FB_D_KV,     FB_D_HIDDEN, FB_IF_ALWAYS,   FB_P_JOIN },
    { "self_attn.q_proj.bias",           FB_ROLE_Q_BIAS,    FB_D_Q,      FB_D_ONE,    FB_IF_QKV_BIAS, FB_P_NO_DECAY },
    { "self_attn.k_proj.bias",           FB_ROLE_K_BIAS,    FB_D_KV,     FB_D_ONE,    FB_IF_QKV_BIAS, FB_P_NO_DECAY | FB_P_JOIN },
    { "self_attn.v_proj.bias",           FB_ROLE_V_BIAS,    FB_D_KV,     FB_D_ONE,    FB_IF_QKV_BIAS, FB_P_NO_DECAY | FB_P_JOIN },
    { "self_attn.o_proj.weight",         FB_ROLE_O,         FB_D_HIDDEN, FB_D_Q,      FB_IF_ALWAYS,   0 },
    { "post_attention_layernorm.weight", FB_ROLE_MLP_NORM,  FB_D_HIDDEN, FB_D_ONE,    FB_IF_ALWAYS,   FB_P_NO_DECAY },
    { "mlp.gate_proj.weight",            FB_ROLE_GATE,      FB_D_FFN,    FB_D_HIDDEN, FB_IF_ALWAYS,   0 },
    { "mlp.up_proj.weight",              FB_ROLE_UP,        FB_D_FFN,    FB_D_HIDDEN, FB_IF_ALWAYS,   FB_P_JOIN },
    { "mlp.down_proj.weight",            FB_ROLE_DOWN,      FB_D_HIDDEN, FB_D_FFN,    FB_IF_ALWAYS,   0 },
};

static const fb_weight_desc qwen2_final[] = {
    { "model.norm.weight",               FB_ROLE_FINAL_NORM, FB_D_HIDDEN, FB_D_ONE,    FB_IF_ALWAYS,   FB_P_NO_DECAY },
    { "lm_head.weight",                  FB_ROLE_HEAD,      FB_D_VOCAB,  FB_D_HIDDEN, FB_IF_UNTIED,   0 },
};

const fb_arch fb_arch_qwen2 = {
    .model_type = "qwen2", .hf_name = "Qwen2ForCausalLM", .layer_prefix = "model.layers.%u.",
    .embed = qwen2_embed, .n_embed = FB_COUNT(qwen2_embed),
    .layer = qwen2_layer, .n_layer = FB_COUNT(qwen2_layer),
    .final = qwen2_final, .n_final = FB_COUNT(qwen2_final),
    .qkv_bias_default = true,
    .window_by_flag = true, .has_window = true, .window_default = 4096, .window_layer_default = 28,
    .n_kv_head_default = 32, .bos_default = -1, .eos_default = -1,
    .rope_theta_default = 1e4, .norm_eps_default = 1e-6,
};
