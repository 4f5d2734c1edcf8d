/* arch_qwen3.c - the qwen3 family: Qwen3.
 * Source: transformers 5.17, models/qwen3.  Differs from Llama: RMSNorm on each head of q and k before RoPE;
 * head_dim is its own key, so Q != HIDDEN; windows as in Qwen2. */
#include "model/arch.h"

#include "base/error.h"

static const fb_weight_desc qwen3_embed[] = {
    { "model.embed_tokens.weight",       FB_ROLE_EMBED,     FB_D_VOCAB,  FB_D_HIDDEN, FB_IF_ALWAYS,   0 },
};

static const fb_weight_desc qwen3_layer[] = {
    { "input_layernorm.weight",          FB_ROLE_ATTN_NORM, FB_D_HIDDEN, FB_D_ONE,    FB_IF_ALWAYS,   FB_P_NO_DECAY },
    { "self_attn.q_proj.weight",         FB_ROLE_Q,         FB_D_Q,      FB_D_HIDDEN, FB_IF_ALWAYS,   0 },
    { "self_attn.k_proj.weight",         FB_ROLE_K,         FB_D_KV,     FB_D_HIDDEN, FB_IF_ALWAYS,   FB_P_JOIN },
    { "self_attn.v_proj.weight",         FB_ROLE_V,         FB_D_KV,     FB_D_HIDDEN, FB_IF_ALWAYS,   FB_P_JOIN },
    { "self_attn.q_proj.bias",           FB_ROLE_Q_BIAS,    FB_D_Q,      FB_D_ONE,    FB_IF_QKV_BIAS, FB_P_NO_DECAY },
    { "self_attn.k_proj.bias",           FB_ROLE_K_BIAS,    FB_D_KV,     FB_D_ONE,    FB_IF_QKV_BIAS, FB_P_NO_DECAY | FB_P_JOIN },
    { "self_attn.v_proj.bias",           FB_ROLE_V_BIAS,    FB_D_KV,     FB_D_ONE,    FB_IF_QKV_BIAS, FB_P_NO_DECAY | FB_P_JOIN },
    { "self_attn.q_norm.weight",         FB_ROLE_Q_NORM,    FB_D_HEAD,   FB_D_ONE,    FB_IF_QK_NORM,  FB_P_NO_DECAY },
    { "self_attn.k_norm.weight",         FB_ROLE_K_NORM,    FB_D_HEAD,   FB_D_ONE,    FB_IF_QK_NORM,  FB_P_NO_DECAY },
    { "self_attn.o_proj.weight",         FB_ROLE_O,         FB_D_HIDDEN, FB_D_Q,      FB_IF_ALWAYS,   0 },
    { "self_attn.o_proj.bias",           FB_ROLE_O_BIAS,    FB_D_HIDDEN, FB_D_ONE,    FB_IF_O_BIAS,   FB_P_NO_DECAY },
    { "post_attention_layernorm.weight", FB_ROLE_MLP_NORM,  FB_D_HIDDEN, FB_D_ONE,    FB_IF_ALWAYS,   FB_P_NO_DECAY },
    { "mlp.gate_proj.weight",            FB_ROLE_GATE,      FB_D_FFN,    FB_D_HIDDEN, FB_IF_ALWAYS,   0 },
    { "mlp.up_proj.weight",              FB_ROLE_UP,        FB_D_FFN,    FB_D_HIDDEN, FB_IF_ALWAYS,   FB_P_JOIN },
    { "mlp.down_proj.weight",            FB_ROLE_DOWN,      FB_D_HIDDEN, FB_D_FFN,    FB_IF_ALWAYS,   0 },
};

static const fb_weight_desc qwen3_final[] = {
    { "model.norm.weight",               FB_ROLE_FINAL_NORM, FB_D_HIDDEN, FB_D_ONE,    FB_IF_ALWAYS,   FB_P_NO_DECAY },
    { "lm_head.weight",                  FB_ROLE_HEAD,      FB_D_VOCAB,  FB_D_HIDDEN, FB_IF_UNTIED,   0 },
};

const fb_arch fb_arch_qwen3 = {
    .model_type = "qwen3", .hf_name = "Qwen3ForCausalLM", .layer_prefix = "model.layers.%u.",
    .embed = qwen3_embed, .n_embed = FB_COUNT(qwen3_embed),
    .layer = qwen3_layer, .n_layer = FB_COUNT(qwen3_layer),
    .final = qwen3_final, .n_final = FB_COUNT(qwen3_final),
    .qkv_bias_key = "attention_bias", .o_bias_follows_key = true, .qk_norm = true,
    .window_by_flag = true, .has_window = true, .window_default = 4096, .window_layer_default = 28,
    .n_kv_head_default = 32, .head_dim_default = 128, .bos_default = -1, .eos_default = -1,
    .rope_theta_default = 1e4, .norm_eps_default = 1e-6,
};
