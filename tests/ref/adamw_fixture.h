/* Written by make_adamw.py with torch 2.11.0+cu130; see there. */
enum { ADAMW_FIXTURE_N = 16, ADAMW_FIXTURE_STEPS = 8 };
static const fb_adamw adamw_fixture_hyper = {
    .lr = 0.01, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-08, .weight_decay = 0.1, .clip = 1
};
static const float adamw_fixture_before[16] = {
    -0x1.a3e8acp-1f, 0x1.952056p-2f, 0x1.cc3dbcp-1f, -0x1.636e70p+0f, -0x1.560202p-3f, 0x1.23fe5ap-2f,
    -0x1.483d26p-1f, -0x1.c98d34p-1f, 0x1.da63d8p-1f, -0x1.122ea8p-1f, -0x1.28e36ep+0f, -0x1.d73370p-2f,
    0x1.6ac5a2p-1f, 0x1.0343f0p+0f, 0x1.d7da50p-3f, 0x1.171510p+0f
};
static const float adamw_fixture_gradient[8][16] = {
    { -0x1.a8d7e2p-20f, -0x1.297e44p-20f, 0x1.78d01ep-16f, 0, 0x1.c493fcp-16f, 0x1.7ca3acp-12f,
    0x1.afb7e4p-10f, -0x1.00f4a2p-8f, -0x1.fb067ep-9f, -0x1.bd391ep-7f, -0x1.90934ap-2f, -0x1.0411eap-2f,
    -0x1.4b679ap+2f, 0x1.7207eep+2f, -0x1.360c7cp+5f, -0x1.0ff42cp+7f },
    { -0x1.66c042p-24f, -0x1.58500ep-24f, 0x1.10dfaap-19f, 0, 0x1.10d936p-13f, -0x1.422284p-12f,
    -0x1.58327ap-10f, -0x1.ad9f48p-9f, -0x1.a83b28p-6f, 0x1.4f489cp-4f, 0x1.6a0356p-2f, -0x1.8dffb4p-1f,
    -0x1.506c48p-1f, -0x1.129bb8p+1f, 0x1.d5a256p+3f, 0x1.a00ed4p+4f },
    { -0x1.7eaa6ep-23f, -0x1.dbb4c0p-21f, -0x1.6abf18p-23f, 0, -0x1.a6cb60p-12f, -0x1.0216d4p-11f,
    -0x1.00c1eep-11f, 0x1.4b5b00p-8f, 0x1.ebc3bcp-6f, 0x1.9ec448p-14f, -0x1.821c50p-4f, -0x1.8d169cp+0f,
    0x1.7024fcp+1f, -0x1.a394d2p+1f, -0x1.4cf17ep+3f, 0x1.2dad50p+6f },
    { 0x1.1e215cp-23f, 0x1.4ea31cp-21f, -0x1.92aa2ep-18f, 0, -0x1.6267dap-13f, -0x1.a2051cp-11f,
    -0x1.e3ee28p-11f, -0x1.b47a34p-9f, -0x1.0c2d36p-6f, 0x1.355b8ap-4f, 0x1.9c83d0p-4f, -0x1.b1b7f2p-4f,
    -0x1.0513aep+1f, -0x1.a8679ap+1f, -0x1.e5e9fep+4f, 0x1.d99fb2p+5f },
    { -0x1.2f08cep-19f, 0x1.729304p-20f, 0x1.bfb4ecp-18f, 0, -0x1.1f1f6cp-16f, 0,
    0x1.6bea68p-9f, 0x1.5b69e4p-8f, -0x1.e28950p-8f, -0x1.660716p-7f, 0x1.4df50cp-3f, 0x1.737602p-1f,
    -0x1.095cdap+1f, 0x1.668732p+0f, 0x1.d5c624p+3f, 0x1.1c1c36p+7f },
    { -0x1.203450p-21f, 0x1.7bdf00p-19f, 0x1.9d8ae4p-17f, 0, 0x1.22a686p-16f, 0,
    -0x1.526af6p-11f, 0x1.7924d4p-9f, 0x1.d0966cp-8f, 0x1.ee48d8p-4f, -0x1.0befc8p-2f, 0x1.4d8c6cp+0f,
    0x1.461268p+0f, -0x1.5a033ep+0f, 0x1.af64a6p+3f, -0x1.cd4884p+6f },
    { -0x1.2de8cep-20f, -0x1.20360ap-20f, 0x1.e9c5c8p-18f, 0, -0x1.4e161ap-14f, 0,
    0x1.09d11ep-10f, 0x1.b04502p-9f, -0x1.ee12c2p-7f, 0x1.2adfb0p-4f, -0x1.0b1766p-2f, 0x1.7e082ap-2f,
    -0x1.153142p+0f, 0x1.50a1d0p+2f, 0x1.093e08p+3f, 0x1.da2e4cp+6f },
    { 0x1.316c88p-21f, 0x1.e8be5ap-22f, 0x1.b62b3ap-18f, 0, -0x1.fed588p-16f, 0,
    -0x1.bb4ad2p-9f, -0x1.09bc98p-8f, 0x1.b80f70p-6f, -0x1.8e5d80p-4f, -0x1.247fa2p-4f, 0x1.9ea9a8p-2f,
    0x1.460c92p-2f, -0x1.9fdfe0p+3f, -0x1.abac70p+4f, 0x1.fca46ep+6f }
};
static const float adamw_fixture_after[16] = {
    -0x1.854734p-1f, 0x1.a49f4cp-2f, 0x1.affd70p-1f, -0x1.609910p+0f, -0x1.44adecp-3f, 0x1.35e0a6p-2f,
    -0x1.4b27dep-1f, -0x1.bd7b48p-1f, 0x1.e37ddap-1f, -0x1.1f9846p-1f, -0x1.228b70p+0f, -0x1.ae4232p-2f,
    0x1.7ab632p-1f, 0x1.ffebdcp-1f, 0x1.0c0270p-2f, 0x1.150c16p+0f
};
static const float adamw_fixture_m[16] = {
    -0x1.66fad0p-22f, 0x1.c32654p-23f, 0x1.df9074p-19f, 0, -0x1.344830p-15f, -0x1.50fc00p-14f,
    -0x1.73d924p-13f, 0x1.e0aa12p-13f, 0x1.081700p-11f, 0x1.da830cp-7f, -0x1.3de12ap-5f, 0x1.49b9d8p-4f,
    -0x1.70cbb0p-2f, -0x1.1509cap+0f, -0x1.b90522p+1f, 0x1.b9dabcp+4f
};
static const float adamw_fixture_v[16] = {
    0x1.bf8204p-42f, 0x1.506b76p-41f, 0x1.1f3fe6p-35f, 0, 0x1.232d82p-27f, 0x1.743da4p-25f,
    0x1.3a9f50p-20f, 0x1.62f5d0p-18f, 0x1.00ac86p-13f, 0x1.eb0738p-10f, 0x1.2d9fa8p-6f, 0x1.db1a1ep-3f,
    0x1.c28266p+0f, 0x1.84033cp+3f, 0x1.3d142cp+7f, 0x1.f0ceb2p+11f
};
