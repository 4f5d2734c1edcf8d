/* arch_llama.c - the llama family: Llama 2, 3, 3.x, SmolLM2, Yi, DeepSeek-LLM.
 * Source: transformers 5.17, models/llama.  attention_bias covers q, k, v and o; mlp_bias the MLP's three. */
#include "model/arch.h"

#include "base/error.h"

static const fb_weight_desc llama_embed[] = {
    { "model.embed_tokens.weight",       FB_ROLE_EMBED,     FB_D_VOCAB,  FB_D_HIDDEN, FB_IF_ALWAYS,   0 },
};

static const fb_weight_desc llama_layer[] = {
    { "input_layernorm.weight",          FB_ROLE_ATTN_NORM, FB_D_HIDDEN, FB_D_ONE,    FB_IF_ALWAYS,   FB_P_NO_DECAY },
    { "self_attn.q_proj.weight",         FB_ROLE_Q,         FB_D_Q,      FB_D_HIDDEN, FB_IF_ALWAYS,   0 },
    { "self_attn.k_proj.weight",         FB_ROLE_K,         FB_D_KV,     FB_D_HIDDEN, FB_IF_ALWAYS,   FB_P_JOIN },
    { "self_attn.v_proj.weight",         FB_ROLE_V,         FB_D_KV,     FB_D_HIDDEN, FB_IF_ALWAYS,   FB_P_JOIN },
    { "self_attn.q_proj.bias",           FB_ROLE_Q_BIAS,    FB_D_Q,      FB_D_ONE,    FB_IF_QKV_BIAS, FB_P_NO_DECAY },
    { "self_attn.k_proj.bias",           FB_ROLE_K_BIAS,    FB_D_KV,     FB_D_ONE,    FB_IF_QKV_BIAS, FB_P_NO_DECAY | FB_P_JOIN },
    { "self_attn.v_proj.bias",           FB_ROLE_V_BIAS,    FB_D_KV,     FB_D_ONE,    FB_IF_QKV_BIAS, FB_P_NO_DECAY | FB_P_JOIN },
    { "self_attn.o_proj.weight",         FB_ROLE_O,         FB_D_HIDDEN, FB_D_Q,      FB_IF_ALWAYS,   0 },
    { "self_attn.o_proj.bias",           FB_ROLE_O_BIAS,    FB_D_HIDDEN, FB_D_ONE,    FB_IF_O_BIAS,   FB_P_NO_DECAY },
    { "post_attention_layernorm.weight", FB_ROLE_MLP_NORM,  FB_D_HIDDEN, FB_D_ONE,    FB_IF_ALWAYS,   FB_P_NO_DECAY },
    { "mlp.gate_proj.weight",            FB_ROLE_GATE,      FB_D_FFN,    FB_D_HIDDEN, FB_IF_ALWAYS,   0 },
    { "mlp.up_proj.weight",              FB_ROLE_UP,        FB_D_FFN,    FB_D_HIDDEN, FB_IF_ALWAYS,   FB_P_JOIN },
    { "mlp.gate_proj.bias",              FB_ROLE_GATE_BIAS, FB_D_FFN,    FB_D_ONE,    FB_IF_MLP_BIAS, FB_P_NO_DECAY },
    { "mlp.up_proj.bias",                FB_ROLE_UP_BIAS,   FB_D_FFN,    FB_D_ONE,    FB_IF_MLP_BIAS, FB_P_NO_DECAY | FB_P_JOIN },
    { "mlp.down_proj.weight",            FB_ROLE_DOWN,      FB_D_HIDDEN, FB_D_FFN,    FB_IF_ALWAYS,   0 },
    { "mlp.down_proj.bias",              FB_ROLE_DOWN_BIAS, FB_D_HIDDEN, FB_D_ONE,    FB_IF_MLP_BIAS, FB_P_NO_DECAY },
};

static const fb_weight_desc llama_final[] = {
    { "model.norm.weight",               FB_ROLE_FINAL_NORM, FB_D_HIDDEN, FB_D_ONE,    FB_IF_ALWAYS,   FB_P_NO_DECAY },
    { "lm_head.weight",                  FB_ROLE_HEAD,      FB_D_VOCAB,  FB_D_HIDDEN, FB_IF_UNTIED,   0 },
};

const fb_arch fb_arch_llama = {
    .model_type = "llama", .hf_name = "LlamaForCausalLM", .layer_prefix = "model.layers.%u.",
    .embed = llama_embed, .n_embed = FB_COUNT(llama_embed),
    .layer = llama_layer, .n_layer = FB_COUNT(llama_layer),
    .final = llama_final, .n_final = FB_COUNT(llama_final),
    .qkv_bias_key = "attention_bias", .o_bias_follows_key = true, .mlp_bias_key = "mlp_bias",
    .n_kv_head_default = 0, .bos_default = 1, .eos_default = 2,
    .rope_theta_default = 1e4, .norm_eps_default = 1e-6,
};
