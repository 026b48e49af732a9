// Native part of the AMD emulation: the wave run loop, scalar/vector/LDS/buffer/scratch memory with bounds checks, atomics,
// branches, cross-lane moves, DPP, SDWA, MFMA and WMMA. ALU instructions are functions generated from pseudo-code (forms.py).
#include "alu.h"
#if defined(__x86_64__)
#include <immintrin.h>
#else
#define _mm_getcsr() 0
#define _mm_setcsr(x) (void)(x)
#endif
enum { NATIVE, DPP, END, NOP, SDWA };
enum { MORE, DONE, BARRIER, DECODE, FAULT };
enum { SCRATCH_MAGIC = 0x00E5C0DE };
enum { GLOBAL, LDS, SCRATCH, BUFFER };                                                       // a[] of a memory instruction:
enum { SPACE, KIND, NB, SX, D16, VA, VD, VR, SA, OFF, AD, RTN, AOP, OFF2, RS, SO, OE, IE, TOLDS, SVE, VD2, GFX9 };
enum { LOAD, STORE, ATOMIC, LOAD2, STORE2, LOADTR };
enum { SWAP, CMPSWAP, ADD, SUB, RSUB, SMIN, UMIN, SMAX, UMAX, AND, OR, XOR, INC, DEC, FADD, FMIN, FMAX, PKF16, PKBF16 };

#define ON(l) (ex >> (l) & 1)
#define V(r, l) w->v[(r) * w->wave + (l)]
static int bad(W *w, u64 a, u32 n, int lane) {  // 0: [a, a+n) lies in one allowed range
  for (u64 i = 0; i < w->nrange; i++) if (a >= w->range[i].lo && a + n <= w->range[i].hi) return 0;
  w->err_addr = a; w->err_lane = lane; w->err_bytes = n; return 1;
}
static int oob_lds(W *w, u32 a, u32 n, int lane) { if ((u64)a + n <= w->lds_size) return 0; w->err_addr = a; w->err_lane = lane; w->err_bytes = -(i32)n; return 1; }

static u32 sval(W *w, int code) { return w->s[code]; }  // SGPR or inline constant (tinygrad keeps the constants in slots 128-255)

int br(E *e, W *w) {  // a: condition, byte displacement
  u64 c = w->wave == 64 ? s64(w, VCC) : w->s[VCC]; int t;
  switch (e->a[0]) { case 0: t = 1; break; case 1: t = !w->s[SCC]; break; case 2: t = !!w->s[SCC]; break; case 3: t = !c; break; case 4: t = !!c; break;
    case 5: t = !execm(w); break; default: t = !!execm(w); }
  if (t) { u64 p = s64(w, PC) + e->a[1]; w->s[PC] = p; w->s[PC + 1] = p >> 32; } return 0;
}
int pcop(E *e, W *w) {  // getpc, setpc, swappc, call; PC is already past the instruction
  int *a = e->a; u64 p = s64(w, PC), q = a[0] == 3 ? p + a[2] : a[0] ? s64(w, a[2]) : p;
  if (a[0] != 1) { w->s[a[1]] = p; w->s[a[1] + 1] = p >> 32; }
  w->s[PC] = q; w->s[PC + 1] = q >> 32; return 0;
}
int smem(E *e, W *w) {  // a: sbase, sdata, offset, soffset(-1), bytes, sign-extend, is_buffer
  int *a = e->a; u64 p = s64(w, a[0]); if (a[6]) p &= 0xffffffffffffull;
  p += (i64)a[2] + (a[3] >= 0 ? w->s[a[3]] : 0); if (a[4] >= 4) p &= ~3ull;
  if (bad(w, p, a[4], -1)) return 1;
  u32 t[16] = {0}; memcpy(t, (void *)p, a[4]);
  if (a[5]) t[0] = a[4] == 1 ? (u32)(i32)(int8_t)t[0] : (u32)(i32)(int16_t)t[0];
  for (int i = 0; i < (a[4] + 3) / 4; i++) w->s[a[1] + i] = t[i];
  return 0;
}
static u64 rmw(int op, int n, u64 o, u64 d, u64 c) {
  if (n == 4) switch (op) {
    case SMIN: return (i32)o < (i32)d ? o : d; case SMAX: return (i32)o > (i32)d ? o : d; case INC: return o >= d ? 0 : o + 1; case DEC: return !o || o > d ? d : o - 1;
    case FADD: return fb(bf(o) + bf(d)); case FMIN: return fb(fminf(bf(o), bf(d))); case FMAX: return fb(fmaxf(bf(o), bf(d)));
    case PKF16: return f2h(h2f(o) + h2f(d)) | f2h(h2f(o >> 16) + h2f(d >> 16)) << 16;
    case PKBF16: return f2bf(bf(o << 16) + bf(d << 16)) | f2bf(bf(o & 0xffff0000) + bf(d & 0xffff0000)) << 16; }
  double x, y; memcpy(&x, &o, 8); memcpy(&y, &d, 8);
  switch (op) {
    case SWAP: return d; case CMPSWAP: return o == c ? d : o; case ADD: return o + d; case SUB: return o - d; case RSUB: return d - o; case SMIN: return (i64)o < (i64)d ? o : d;
    case UMIN: return o < d ? o : d; case SMAX: return (i64)o > (i64)d ? o : d; case UMAX: return o > d ? o : d; case AND: return o & d; case OR: return o | d; case XOR: return o ^ d;
    case INC: return o >= d ? 0 : o + 1; case DEC: return !o || o > d ? d : o - 1; case FADD: x += y; break; case FMIN: x = fmin(x, y); break; case FMAX: x = fmax(x, y); break; }
  memcpy(&o, &x, 8); return o;
}
int mem(E *e, W *w) {
  int *a = e->a, n = a[NB], nr = (n + 3) / 4; u64 ex = execm(w); u32 *F = a[AD] ? w->acc : w->v; static u32 tr[64][4];
#define R(r, l) F[(r) * w->wave + (l)]
  for (int l = 0; l < (int)w->wave; l++) if (ON(l)) {
    u8 *p = 0; u32 t[8] = {0}; u64 g = 0, rec = ~0ull; i64 o = 0;
    switch (a[SPACE]) {
      case GLOBAL: g = (a[SA] >= 0 ? s64(w, a[SA]) + V(a[VA], l) : V(a[VA], l) | (u64)V(a[VA] + 1, l) << 32) + (i64)a[OFF]; break;
      case LDS: g = V(a[VA], l); break;
      case SCRATCH: g = (a[SVE] ? V(a[VA], l) : 0) + (a[SA] >= 0 ? w->s[a[SA]] : 0) + a[OFF]; break;
      case BUFFER: {
        u32 *d = w->s + a[RS], so = sval(w, a[SO]), ix = a[IE] ? V(a[VA], l) : 0, st = d[1] >> 16 & 0x3fff; o = (u32)((a[OE] ? V(a[VA] + a[IE], l) : 0) + a[OFF]);
        if (d[3] == SCRATCH_MAGIC) { g = o + so / w->wave; break; }  // gfx90a scratch through s[0:3]; the scalar offset counts bytes of the whole wave
        o += (u64)st * ix; g = (d[0] | (u64)(d[1] & 0xffff) << 32) + o + so; rec = (i64)d[2] - (a[GFX9] ? so : 0); break; }
    }
    int scr = a[SPACE] == SCRATCH || (a[SPACE] == BUFFER && rec == ~0ull);
    if (a[SPACE] == LDS) {
      int two = a[KIND] == LOAD2 || a[KIND] == STORE2;
      for (int k = 0; k < (two ? 2 : 1); k++) { u32 q = (u32)g + (k ? a[OFF2] : a[OFF]); if (oob_lds(w, q, n, l)) return 1;
        p = w->lds + q;
        if (a[KIND] == LOAD2) memcpy(t + k * nr, p, n);
        else if (two) { for (int i = 0; i < nr; i++) t[i] = R(k ? a[VD2] + i : a[VD] + i, l); memcpy(p, t, n); } }
      if (a[KIND] == LOAD2) for (int i = 0; i < 2 * nr; i++) R(a[VR] + i, l) = t[i];
      if (two) continue;
    } else if (scr) { if (g + n > w->scr_stride) { w->err_addr = g; w->err_lane = l; w->err_bytes = -(i32)n; return 1; } p = w->scr + (u64)l * w->scr_stride + g; }
    else { if (rec == ~0ull || o + (n < 4 ? n : 4) <= (i64)rec) { if (bad(w, g, n, l)) return 1; p = (u8 *)g; } }   // p == 0: out-of-range buffer access
    if (a[KIND] == LOAD || a[KIND] == LOADTR) {
      if (p) memcpy(t, p, n);
      if (a[TOLDS]) { u32 q = (w->s[w->wave == 64 ? 124 : 125] & 0x3ffff) + (a[SPACE] == GLOBAL ? 0 : a[OFF]) + l * (n < 4 ? 4 : n); if (oob_lds(w, q, n, l)) return 1; memcpy(w->lds + q, t, n < 4 ? 4 : n); continue; }
      if (a[KIND] == LOADTR) { memcpy(tr[l], t, n); continue; }
      if (a[SX]) t[0] = n == 1 ? (u32)(i32)(int8_t)t[0] : (u32)(i32)(int16_t)t[0];
      if (a[D16] == 1) t[0] = (R(a[VR], l) & 0xffff0000) | (t[0] & 0xffff); else if (a[D16] == 2) t[0] = (R(a[VR], l) & 0xffff) | t[0] << 16;
      for (int i = 0; i < nr; i++) R(a[VR] + i, l) = t[i];
    } else if (a[KIND] == STORE) {
      for (int i = 0; i < nr; i++) t[i] = R(a[VD] + i, l);
      if (a[D16] == 2) t[0] >>= 16;
      if (p) memcpy(p, t, n);
    } else {  // atomic
      u64 old = 0, d = R(a[VD], l), c = 0; if (n == 8) d |= (u64)R(a[VD] + 1, l) << 32;
      if (a[AOP] == CMPSWAP) { int r = a[SPACE] == LDS ? a[VD2] : a[VD] + n / 4; c = R(r, l); if (n == 8) c |= (u64)R(r + 1, l) << 32; }
      if (a[AOP] == CMPSWAP && a[SPACE] == LDS && a[GFX9]) { u64 x = c; c = d; d = x; }  // GFX9: data0 compare, data1 new; GFX11+: data0 new, data1 compare
      if (p) { memcpy(&old, p, n); u64 nv = rmw(a[AOP], n, old, d, c); memcpy(p, &nv, n); }
      if (a[RTN]) { R(a[VR], l) = old; if (n == 8) R(a[VR] + 1, l) = old >> 32; }
    }
  }
  if (a[KIND] == LOADTR) {  // ds_read_b64_tr_b16/b8: in each block of 16 lanes, a 16-column tile is returned transposed
    int eb = a[AOP], per = n / eb, lpr = 16 / per;  // element bytes, elements per lane, lanes per 16-element row
    for (int l = 0; l < 64; l++) if (ON(l)) { u8 t[16]; for (int j = 0; j < per; j++) memcpy(t + j * eb, (u8 *)tr[(l & ~15) + j * lpr + (l & 15) / per] + (l & 15) % per * eb, eb);
      for (int i = 0; i < nr; i++) { u32 x; memcpy(&x, t + 4 * i, 4); R(a[VR] + i, l) = x; } }
  }
  return 0;
}
// cross-lane: a: which, vdst/sdst, src0 code, src1 code, src2 code, literal, opsel, acc
static u32 srcl(E *e, W *w, int c, int l) { return c >= 256 ? V(c - 256, l) : c == 255 ? (u32)e->a[5] : sval(w, c); }
int xlane(E *e, W *w) {
  int *a = e->a, W_ = w->wave; u64 ex = execm(w); u32 t[64];
  int first = ex ? __builtin_ctzll(ex) : 0;
  switch (a[0]) {
    case 0: w->s[a[1]] = srcl(e, w, a[2], first); break;                                        // readfirstlane
    case 1: w->s[a[1]] = srcl(e, w, a[2], srcl(e, w, a[3], 0) & (W_ - 1)); break;               // readlane
    case 2: { int l = srcl(e, w, a[3], 0) & (W_ - 1); V(a[1], l) = srcl(e, w, a[2], 0); } break;  // writelane
    case 3: case 4: {                                                                           // permlane16 / permlanex16
      u64 sel = srcl(e, w, a[3], 0) | (u64)srcl(e, w, a[4], 0) << 32;
      for (int l = 0; l < W_; l++) { int q = ((l & ~15) ^ (a[0] == 4 ? 16 : 0)) | (sel >> (l & 15) * 4 & 15); t[l] = ON(q) || (a[6] & 1) ? srcl(e, w, a[2], q) : a[6] & 2 ? 0 : V(a[1], l); }
      for (int l = 0; l < W_; l++) if (ON(l)) V(a[1], l) = t[l]; } break;
    case 5: case 6: { int h = a[0] == 5 ? 32 : 16, d = a[1], s = a[2] - 256;                    // permlane32_swap / permlane16_swap: odd rows of vdst <-> even rows of src0
      for (int l = 0; l < W_; l++) if (!(l & h) && ON(l) && ON(l + h)) { u32 x = V(d, l + h); V(d, l + h) = V(s, l); V(s, l) = x; } } break;
    case 7: case 8: {                                                                           // ds_bpermute / ds_permute: addr vgpr a[3], data vgpr a[2], offset a[5]
      memset(t, 0, sizeof t);
      for (int l = 0; l < W_; l++) if (ON(l)) { int q = (V(a[3], l) + a[5]) >> 2 & (W_ - 1); if (a[0] == 7) t[l] = ON(q) ? V(a[2], q) : 0; else t[q] = V(a[2], l); }
      for (int l = 0; l < W_; l++) if (ON(l)) V(a[1], l) = t[l]; } break;
    case 9:                                                                                     // ds_swizzle, pattern a[5]
      for (int l = 0; l < W_; l++) { int q, p = a[5];
        if (W_ == 64 && (p & 0xe000) == 0xe000) q = l;  // FFT mode: not generated by LLVM
        else if ((p & 0xe000) == 0xc000) { int m = p & 31, s = p >> 5 & 31, i = l & 31; q = (l & ~31) | (i & m) | (((p & 0x400 ? i - s : i + s) & 31) & ~m); }
        else if (p & 0x8000) q = (l & ~3) | (p >> 2 * (l & 3) & 3);
        else q = (l & ~31) | ((((l & 31) & (p & 31)) | (p >> 5 & 31)) ^ (p >> 10 & 31));
        t[l] = ON(q) ? V(a[2], q) : 0; }
      for (int l = 0; l < W_; l++) if (ON(l)) V(a[1], l) = t[l]; break;
    case 10: for (int l = 0; l < W_; l++) if (ON(l)) V(a[1], l) = w->acc[(a[2] - 256) * W_ + l]; break;              // accvgpr_read
    case 11: for (int l = 0; l < W_; l++) if (ON(l)) w->acc[a[1] * W_ + l] = srcl(e, w, a[2], l); break;             // accvgpr_write
    case 12: for (int l = 0; l < W_; l++) if (ON(l)) w->acc[a[1] * W_ + l] = w->acc[(a[2] - 256) * W_ + l]; break;   // accvgpr_mov
    case 14: case 15: for (int l = 0; l < W_; l++) if (ON(l)) {                                  // v_dot2_f16_f16 / v_dot2_bf16_bf16, op_sel in a[6]
      u32 x = srcl(e, w, a[2], l), y = srcl(e, w, a[3], l), z = srcl(e, w, a[4], l); if (a[6] & 4) z >>= 16; int b = a[0] == 15, p = a[6] & 1 ? 16 : 0, q = a[6] & 2 ? 16 : 0;
#define C16(v, s) (b ? bf(((v) >> (s)) << 16) : h2f((v) >> (s)))
      float f = C16(x, p) * C16(y, q) + C16(x, 16 - p) * C16(y, 16 - q) + (a[4] < 256 && a[4] >= 240 ? bf(z) : C16(z, 0)); u32 r = b ? f2bf(f) : f2h(f);
      V(a[1], l) = a[6] & 8 ? (V(a[1], l) & 0xffff) | r << 16 : (V(a[1], l) & 0xffff0000) | r; } break;
    case 13: for (int l = 0; l < W_; l++) t[l] = V(a[2] - 256, l ^ 32); for (int l = 0; l < W_; l++) if (ON(l)) V(a[1], l) = t[l]; break;  // permlane64
  }
  return 0;
}
// DPP: a: ctrl, row_mask, bank_mask, bound_ctrl, fetch_inactive, src vgpr, temp vgpr, mode (0 dpp16, 1 dpp8), abs, neg, 16bit
// Puts the permuted source in the temp VGPR and clears EXEC for the lanes that do not write; the plain form of the instruction runs next.
static int dpp_src(int c, int l, int W_, int g9) {
  int r = l & ~15, i = l & 15, n = c & 15;
  if (c < 0x100) return (l & ~3) | (c >> 2 * (l & 3) & 3);
  switch (c & 0x1f0) { case 0x100: return i + n < 16 ? l + n : -1; case 0x110: return i >= n ? l - n : -1; case 0x120: return r | ((i - n) & 15);
    case 0x150: return r | n; case 0x160: return g9 ? -2 : r | (i ^ n);  }
  switch (c) { case 0x130: return l + 1 < W_ ? l + 1 : -1; case 0x134: return (l + 1) % W_; case 0x138: return l ? l - 1 : -1; case 0x13c: return (l + W_ - 1) % W_;
    case 0x140: return r | (15 - i); case 0x141: return (l & ~7) | (7 - (l & 7)); case 0x142: return l >= 16 ? r - 1 : -1; case 0x143: return l >= 32 ? 31 : -1; }
  return -2;
}
static int dpp(E *e, W *w) {
  int *a = e->a, W_ = w->wave, c = a[0]; u64 ex = execm(w), nx = 0; u32 t[64] = {0};
  for (int l = 0; l < W_; l++) if (ON(l)) {
    int q = a[7] ? (l & ~7) | (c >> 3 * (l & 7) & 7) : dpp_src(c, l, W_, W_ == 64), on = a[7] || ((a[1] >> (l / 16 & 3) & 1) && (a[2] >> (l / 4 & 3) & 1));
    if (q == -2) return 1;
    int ok = q >= 0 && (ON(q) || a[4]);
    if (!on || (!ok && !a[3])) continue;
    u32 x = ok ? V(a[5], q) : 0, sg = a[10] ? 0x8000 : 0x80000000u; if (a[8]) x &= ~sg; if (a[9]) x ^= sg;
    t[l] = x; nx |= 1ull << l; }
  for (int l = 0; l < W_; l++) V(a[6], l) = t[l];
  w->s[EXEC] = nx; if (W_ == 64) w->s[EXEC + 1] = nx >> 32;
  return 0;
}
// matrix: a: M, N, K, B, typeA, typeB, typeOut, vdst, src0, src1, src2, accA, accB, accCD, wmma (0 mfma, 3 rdna3, 4 rdna4), opsel, negA, negB, fnuz
enum { T_F16, T_BF16, T_F32, T_XF32, T_F64, T_I8, T_FP8, T_BF8, T_I32, T_U8 };
// 8-bit float conversions: a: to 8-bit (1) or from (0), mantissa bits of the 8-bit type, wide type, vdst, src0, src1, scale source, op_sel, fnuz, single (not packed), SDWA byte/word select
static u32 srcl(E *e, W *w, int c, int l);
int cvt8(E *e, W *w) {
  int *a = e->a; u64 ex = execm(w);
  for (int l = 0; l < (int)w->wave; l++) if (ON(l)) {
    double sc = ldexp(1, (int)(srcl(e, w, a[6], l) >> 23 & 255) - 127); u32 x = srcl(e, w, a[4], l), y, lo, hi;
    if (a[0]) {
      double p, q; if (a[2] == 2) { p = bf(x); q = bf(srcl(e, w, a[5], l)); } else if (a[2] == 0) { p = h2f(x); q = h2f(x >> 16); } else { p = bf(x << 16); q = bf(x & 0xffff0000); }
      y = enc8(p / sc, a[1], a[8]) | enc8(q / sc, a[1], a[8]) << 8; u32 *d = &V(a[3], l); *d = a[7] & 8 ? (*d & 0xffff) | y << 16 : (*d & 0xffff0000) | y;
    } else {
      if (a[7] & 1 || a[10] == 5) x >>= 16; if (a[10] < 4) x >>= 8 * a[10];
      float p = f8_(x & 255, a[1], a[8]) * sc, q = f8_(x >> 8 & 255, a[1], a[8]) * sc;
      if (a[9]) V(a[3], l) = fb(p);
      else if (a[2] == 2) { V(a[3], l) = fb(p); V(a[3] + 1, l) = fb(q); } else { lo = a[2] ? f2bf(p) : f2h(p); hi = a[2] ? f2bf(q) : f2h(q); V(a[3], l) = lo | hi << 16; }
    } }
  return 0;
}
#ifdef __F16C__
#define H2F(x) _cvtsh_ss((u16)(x))
#else
#define H2F(x) h2f(x)
#endif
// One operand of epl elements per lane, unpacked to doubles: lane l's element j goes to T[pos[l] + j * st].
static void unpack(u32 *F, int W_, int nl, int epl, int ty, int fnuz, double *T, const int *pos, int st) {
  int per = ty == T_F16 || ty == T_BF16 ? 2 : ty == T_F32 || ty == T_XF32 || ty == T_F64 ? 1 : 4;
  for (int j = 0; j < epl; j++) { const u32 *r = F + (ty == T_F64 ? 2 * j : j / per) * W_; int sh = per == 2 ? 16 * (j & 1) : per == 4 ? 8 * (j & 3) : 0; double *t = T + j * st;
#define EACH(x) for (int l = 0; l < nl; l++) { u32 u = r[l] >> sh; t[pos[l]] = x; } break
    switch (ty) { case T_F16: EACH(H2F(u)); case T_BF16: EACH(bf(u << 16)); case T_F32: EACH(bf(u)); case T_F64: EACH(bd(u | (u64)r[W_ + l] << 32)); case T_I8: EACH((int8_t)u); case T_U8: EACH((u8)u);
      case T_XF32: EACH(bf((u >> 23 & 255) != 255 ? (u + 0xfff + (u >> 13 & 1)) & ~0x1fffu : u)); default: EACH(f8_(u & 255, ty == T_FP8 ? 3 : 2, fnuz)); } }
}
int mma(E *e, W *w) {
  int *a = e->a, M = a[0], N = a[1], K = a[2], B = a[3], W_ = w->wave, rd = a[14], out = a[6];
  static double A[64 * 128 * 4], X[64 * 128 * 4], P[4096]; u32 *FA = a[11] ? w->acc : w->v, *FB = a[12] ? w->acc : w->v, *FD = a[13] ? w->acc : w->v;   // A: [block][row][k], X: [block][k][column]
  for (int h = 0; h < 2; h++) { int D = h ? N : M, epl = rd == 3 ? K : K * D * B / W_, c = a[8 + h], nl = rd == 3 ? 16 : W_, pos[64]; if (c < 256) { w->err_addr = 0; return 1; }
    for (int l = 0; l < nl; l++) { int i = l % D, g = l / D, b = B > 1 ? g % B : 0, k = (B > 1 ? g / B : g) * epl; pos[l] = h ? (b * K + k) * N + i : (b * M + i) * K + k; }
    unpack((h ? FB : FA) + (c - 256) * W_, W_, nl, epl, a[4 + h], a[18], h ? X : A, pos, h ? N : 1);
    if (a[16 + h]) for (int i = 0; i < B * D * K; i++) (h ? X : A)[i] *= -1; }
  for (int b = 0; b < B; b++) for (int i = 0; i < M; i++) { double acc[32] = {0}, *x = X + b * K * N, *r = A + (b * M + i) * K;
    if (N == 32) for (int k = 0; k < K; k++) for (int j = 0; j < 32; j++) acc[j] += r[k] * x[k * 32 + j];
    else if (N == 16) for (int k = 0; k < K; k++) for (int j = 0; j < 16; j++) acc[j] += r[k] * x[k * 16 + j];
    else for (int k = 0; k < K; k++) for (int j = 0; j < N; j++) acc[j] += r[k] * x[k * N + j];
    memcpy(P + (b * M + i) * N, acc, 8 * N); }
  int w64 = out == T_F64, nd = M * N * B / W_; static u32 O[64 * 64]; static int OR[64 * 64]; int no = 0;  // results are written last: D may partly overlap C
  for (int r = 0; r < nd; r++) for (int l = 0; l < W_; l++) {
    int i, j = l % N, g = l / N, b = 0, reg = r, sh = 0;
    if (rd) { i = rd == 3 ? 2 * r + g : 8 * g + r; if (out == T_F16 || out == T_BF16) { if (rd == 4) { reg = r / 2; sh = 16 * (r & 1); } else sh = a[15] & 4 ? 16 : 0; } }
    else if (w64) { if (B > 1) { i = g % 4; b = g / 4; /* 4x4x4 4b: D[i][j] of block b at lane j + 4*b + 16*i */ i = l / 16; b = l / 4 % 4; } else i = 4 * r + g; reg = 2 * r; }
    else if (M == 4) { i = r; b = g; }
    else { int per = M * N / W_, q = r % per; b = r / per; i = M == 32 ? 8 * (q / 4) + 4 * g + q % 4 : 4 * g + q; }
    double s = P[(b * M + i) * N + j], c;
    int c2 = a[10], r2 = c2 - 256 + reg; u32 o;
    if (w64) { u64 x; if (c2 >= 256) { x = FD[r2 * W_ + l] | (u64)FD[(r2 + 1) * W_ + l] << 32; memcpy(&c, &x, 8); } else c = c2 >= 240 ? bf(sval(w, c2)) : (double)(i32)sval(w, c2);
      s += c; memcpy(&x, &s, 8); OR[no] = (a[7] + reg) * W_ + l; O[no++] = x; OR[no] = (a[7] + reg + 1) * W_ + l; O[no++] = x >> 32; continue; }
    u32 cv = c2 >= 256 ? FD[r2 * W_ + l] : sval(w, c2);
    if (out == T_I32) o = (u32)(i32)((i64)s + (i32)cv);
    else if (out == T_F32) o = fb((float)(s + bf(cv)));
    else { c = c2 < 256 ? bf(cv) : out == T_F16 ? h2f(cv >> sh) : bf(cv >> sh << 16); float f = (float)(s + c); u32 hv = out == T_F16 ? f2h(f) : f2bf(f); int q = (a[7] + reg) * W_ + l;
      if (rd == 4 && sh) { O[no - W_] |= hv << 16; continue; }  // the low half was the previous row of results
      o = rd == 4 ? hv : (FD[q] & ~(0xffffu << sh)) | hv << sh; }
    OR[no] = (a[7] + reg) * W_ + l; O[no++] = o;
  }
  for (int k = 0; k < no; k++) FD[OR[k]] = O[k];
  return 0;
}
static int call(E *e, W *w) { return ((int (*)(E *, W *))e->fn)(e, w); }
// SDWA: a: per source {code, is_sgpr, sel, sext, abs, neg, bits} at 0 and 7, then 14 temp0, 15 temp1 (-1: none), 16 dst_sel, 17 dst_unused, 18 vdst, 19 sdst (-1: VCC or none)
static u32 sdwa_sel(u32 x, int *a) {
  int b = a[2] < 4 ? 8 : a[2] < 6 ? 16 : 32; x >>= a[2] < 4 ? 8 * a[2] : a[2] == 5 ? 16 : 0; if (b < 32) x &= (1u << b) - 1;
  if (a[3] && b < 32) x = (u32)((i32)(x << (32 - b)) >> (32 - b));
  u32 sg = a[6] == 16 ? 0x8000 : 0x80000000u; if (a[4]) x &= ~sg; if (a[5]) x ^= sg; return x;
}
static void sdwa(E *e, W *w) {
  int *a = e->a, W_ = w->wave, n = 4 * W_, ds = a[16]; u64 ex = execm(w), vcc = s64(w, VCC); u32 t0[64], t1[64], s0[64], s1[64], old[64], *p0 = w->v + a[14] * W_, *p1 = w->v + (a[15] < 0 ? a[14] : a[15]) * W_, *d = w->v + a[18] * W_;
  for (int l = 0; l < W_; l++) { t0[l] = sdwa_sel(a[1] ? w->s[a[0]] : V(a[0], l), a); if (a[15] >= 0) t1[l] = sdwa_sel(a[8] ? w->s[a[7]] : V(a[7], l), a + 7); }
  memcpy(s0, p0, n); memcpy(s1, p1, n); memcpy(old, d, n); memcpy(p0, t0, n); if (a[15] >= 0) memcpy(p1, t1, n);
  call((E *)e->sub, w);
  memcpy(p1, s1, n); memcpy(p0, s0, n);
  if (a[19] >= 0) { w->s[a[19]] = w->s[VCC]; w->s[a[19] + 1] = w->s[VCC + 1]; w->s[VCC] = vcc; w->s[VCC + 1] = vcc >> 32; }
  if (ds != 6) for (int l = 0; l < W_; l++) if (ON(l)) {
    int bits = ds < 4 ? 8 : 16, sh = ds < 4 ? 8 * ds : 16 * (ds - 4); u32 m = ((1u << bits) - 1) << sh, x = d[l] << sh & m;
    d[l] = a[17] == 2 ? (old[l] & ~m) | x : a[17] == 1 && (x >> (sh + bits - 1) & 1) ? x | (u32)(~0ull << (sh + bits)) : x; }
}
int run(W *w, E **tab, u64 base, u64 n, u64 quantum) {
  u32 csr = _mm_getcsr(); int rc = MORE; _mm_setcsr(w->mxcsr);
  for (u64 k = 0; k < quantum; k++) {
    u64 pc = s64(w, PC), i = (pc - base) / 4; E *e = i < n ? tab[i] : 0;
    if (!e) { rc = i < n ? DECODE : FAULT; w->err_lane = -9; break; }
    w->steps++; if (e->kind == END) { rc = DONE; break; }
    u64 nx = pc + e->size; w->s[PC] = nx; w->s[PC + 1] = nx >> 32;
    if (e->kind == NATIVE) { if (call(e, w)) { w->s[PC] = pc; w->s[PC + 1] = pc >> 32; rc = FAULT; break; } }
    else if (e->kind == SDWA) sdwa(e, w);
    else if (e->kind == DPP) { u32 x0 = w->s[EXEC], x1 = w->s[EXEC + 1], sv[64]; int t = e->a[6] * w->wave; memcpy(sv, w->v + t, 4 * w->wave);
      if (dpp(e, w)) { w->s[PC] = pc; w->s[PC + 1] = pc >> 32; rc = FAULT; w->err_lane = -8; break; }
      if (w->s[EXEC] | (w->wave == 64 ? w->s[EXEC + 1] : 0) | e->a[11]) call((E *)e->sub, w);
      w->s[EXEC] = x0; w->s[EXEC + 1] = x1; memcpy(w->v + t, sv, 4 * w->wave);
    }
    if (w->wave == 32) w->s[124] = 0;  // NULL reads as zero
    if (e->stop) { rc = BARRIER; break; }
  }
  _mm_setcsr(csr); return rc;
}
