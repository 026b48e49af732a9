// Shared by core.c and by the generated ALU functions: wave state, instruction entries, number formats and the helpers that translated pseudo-code calls.
#include <stdint.h>
#include <string.h>
#include <math.h>
typedef uint8_t u8; typedef uint16_t u16; typedef uint32_t u32; typedef uint64_t u64; typedef int32_t i32; typedef int64_t i64;
typedef unsigned __int128 u128; typedef __int128 i128;
typedef struct { u64 lo, hi; } Range;
typedef struct { u32 *s, *v, *acc; u8 *lds, *scr; u32 lds_size, scr_stride, wave, mxcsr; u64 nrange; Range *range; u64 err_addr; i32 err_lane, err_bytes; u64 steps;
                 u64 mex; u32 ieee, pad; u32 m[64]; } W;             // m: per-lane write masks for the EXEC value in mex
typedef struct { void *fn; i32 kind, size, stop, pad; i32 a[32]; u64 c[8]; u64 sub; } E;
enum { PC = 256, SCC = 253, VCC = 106, EXEC = 126 };
static inline u64 s64(W *w, int r) { return w->s[r] | (u64)w->s[r + 1] << 32; }
static inline u64 execm(W *w) { return w->wave == 64 ? s64(w, EXEC) : w->s[EXEC]; }
static inline const u32 *lanes(W *w) { u64 ex = execm(w); if (ex != w->mex) { w->mex = ex; for (int l = 0; l < 64; l++) w->m[l] = -(u32)(ex >> l & 1); } return w->m; }
static inline u32 sc32(W *w, E *e, int i) { int r = e->a[2 + i]; return r < 0 ? (u32)e->c[i] : w->s[r]; }   // scalar operand i: an SGPR, or a constant
static inline u64 sc64(W *w, E *e, int i) { int r = e->a[2 + i]; return r < 0 ? e->c[i] : s64(w, r); }
static inline u64 pack(const u8 *b, int n) { u64 r = 0; for (int i = 0; i < n; i += 8) { u64 x; memcpy(&x, b + i, 8); r |= (x * 0x0102040810204080ull >> 56) << i; } return r; }
static inline void wmask(W *w, int r, u64 m, int wave) { w->s[r] = m; if (wave == 64) w->s[r + 1] = m >> 32; }

static inline float bf(u32 x) { float f; memcpy(&f, &x, 4); return f; }
static inline u32 fb(float f) { u32 x; memcpy(&x, &f, 4); return x; }
static inline double bd(u64 x) { double f; memcpy(&f, &x, 8); return f; }
static inline u64 db(double f) { u64 x; memcpy(&x, &f, 8); return x; }
static inline float h2f(u32 h) {       // every half is a normal float or zero, so nothing here depends on the denormal mode
  u32 o = (h & 0x7fff) << 13, e = o & 0x0f800000; u32 nrm = o + (112u << 23) + (e == 0x0f800000 ? 112u << 23 : 0);
  u32 den = fb(bf(o + (113u << 23)) - bf(113u << 23)); return bf((e ? nrm : den) | (h & 0x8000) << 16); }
static inline u32 f2h(float f) {       // round to nearest even
  u32 x = fb(f), s = x >> 16 & 0x8000, a = x & 0x7fffffff; u32 den = fb(bf(a) + 0.5f) - 0x3f000000, nrm = (a - 0x38000000 + 0xfff + (a >> 13 & 1)) >> 13;
  u32 big = a > 0x7f800000 ? 0x7e00 | (a >> 13 & 0x3ff) : 0x7c00; return s | (a >= 0x47800000 ? big : a < 0x38800000 ? den : nrm); }
static inline u32 f2h_rtz(float f) { u32 r = f2h(f); float b = h2f(r); return f == f && fabsf(b) > fabsf(f) ? r - 1 : r; }
static inline u32 f2bf(float f) { u32 x = fb(f); return f != f ? x >> 16 | 0x40 : (x + 0x7fff + (x >> 16 & 1)) >> 16; }
static inline float b2f(u32 x) { return bf(x << 16); }
static inline float rh(float f) { return h2f(f2h(f)); }
static inline float rbf(float f) { return b2f(f2bf(f)); }
static inline float oddf(double d) { float f = (float)d; u32 x = fb(f); if ((double)f != d && d == d) { if (fabs((double)f) > fabs(d)) x--; x |= 1; } return bf(x); }  // to be rounded again to a narrower type
static inline float fma16(float a, float b, float c) { return rh(oddf(fma((double)a, b, c))); }
static inline double f8_(u32 x, int mant, int fnuz) {
  int s = x >> 7 & 1, ebits = 7 - mant, ex = x >> mant & ((1 << ebits) - 1), m = x & ((1 << mant) - 1), bias = (1 << (ebits - 1)) - 1 + fnuz; double r;
  if (fnuz && x == 0x80) return NAN;
  if (!fnuz && mant == 3 && (x & 0x7f) == 0x7f) return NAN;
  if (!fnuz && mant == 2 && ex == 31) return m ? NAN : s ? -INFINITY : INFINITY;
  r = ex ? ldexp(1 + ldexp(m, -mant), ex - bias) : ldexp(m, 1 - bias - mant); return s ? -r : r;
}
static inline u32 enc8(double x, int mant, int fnuz) {  // round to nearest even; overflow gives NaN (E4M3, FNUZ) or infinity (E5M2)
  int ebits = 7 - mant, bias = (1 << (ebits - 1)) - 1 + fnuz, e, s = signbit(x) ? 0x80 : 0; double a = fabs(x);
  u32 nan_ = fnuz ? 0x80 : 0x7f; if (x != x) return nan_; if (a == 0) return fnuz ? 0 : s;
  frexp(a, &e); e -= 1; if (e < 1 - bias) e = 1 - bias;
  double q = nearbyint(ldexp(a, mant - e)); if (q >= 2 << mant) { q /= 2; e++; }
  u32 r = q < 1 << mant ? (u32)q : (u32)(e + bias) << mant | ((u32)q & ((1 << mant) - 1)), mx = fnuz ? 0x7f : mant == 3 ? 0x7e : 0x7b;
  if (a > 1e300 || r > mx) return fnuz ? 0x80 : mant == 3 ? s | 0x7f : s | 0x7c;
  return fnuz && !r ? 0 : s | r;
}
// ---- float to integer: NaN gives 0, the rest saturates
static inline i32 f32_i32(float x) { return x != x ? 0 : x >= 2147483648.f ? 0x7fffffff : x < -2147483648.f ? (i32)0x80000000 : (i32)x; }
static inline u32 f32_u32(float x) { return !(x > 0) ? 0 : x >= 4294967296.f ? 0xffffffffu : x >= 2147483648.f ? (u32)(i32)(x - 2147483648.f) + 0x80000000u : (u32)(i32)x; }
static inline i32 f64_i32(double x) { return x != x ? 0 : x >= 2147483647. ? 0x7fffffff : x <= -2147483648. ? (i32)0x80000000 : (i32)x; }
static inline u32 f64_u32(double x) { return !(x > 0) ? 0 : x >= 4294967295. ? 0xffffffffu : (u32)x; }
static inline i32 f_int(float x, float lo, float hi) { return x != x ? 0 : x >= hi ? (i32)hi : x <= lo ? (i32)lo : (i32)x; }
static inline i32 satint(i64 x, i64 lo, i64 hi) { return x < lo ? lo : x > hi ? hi : x; }
// ---- minimum and maximum: NUM ignores a quiet NaN, the others propagate it; -0 < +0
#define SNAN32(x) ((fb(x) & 0x7fffffff) > 0x7f800000 && !(fb(x) & 0x400000))
#define SNAN64(x) ((db(x) & ~(1ull << 63)) > 0x7ffull << 52 && !(db(x) & 1ull << 51))
#define QUIET32(x) bf(fb(x) | 0x400000)
#define QUIET64(x) bd(db(x) | 1ull << 51)
#define MM(n, T, U, F, B, bits) \
  static inline T vmin##n(T a, T b, u32 ieee) { T r = a == b ? F(B(a) | B(b)) : a < b || b != b ? a : b; r = r != r ? QUIET##bits(r) : r; r = ieee && SNAN##bits(b) ? QUIET##bits(b) : r; return ieee && SNAN##bits(a) ? QUIET##bits(a) : r; } \
  static inline T vmax##n(T a, T b, u32 ieee) { T r = a == b ? F(B(a) & B(b)) : a > b || b != b ? a : b; r = r != r ? QUIET##bits(r) : r; r = ieee && SNAN##bits(b) ? QUIET##bits(b) : r; return ieee && SNAN##bits(a) ? QUIET##bits(a) : r; } \
  static inline T vminimum##n(T a, T b, u32 i) { T r = vmin##n(a, b, 0); r = b != b ? QUIET##bits(b) : r; return a != a ? QUIET##bits(a) : r; } \
  static inline T vmaximum##n(T a, T b, u32 i) { T r = vmax##n(a, b, 0); r = b != b ? QUIET##bits(b) : r; return a != a ? QUIET##bits(a) : r; }
MM(32, float, u32, bf, fb, 32)
MM(64, double, u64, bd, db, 64)
static inline u32 fclass32(float f, u32 m) { u32 x = fb(f), a = x & 0x7fffffff, n = x >> 31;   // bit: sNaN, qNaN, -inf, -normal, -denormal, -0, +0, +denormal, +normal, +inf
  u32 k = a > 0x7f800000 ? x >> 22 & 1 : a == 0x7f800000 ? (n ? 2 : 9) : a >= 0x800000 ? (n ? 3 : 8) : a ? (n ? 4 : 7) : n ? 5 : 6; return m >> k & 1; }
static inline u32 fclass16(u32 x, u32 m) { u32 a = x & 0x7fff, n = x >> 15 & 1; u32 k = a > 0x7c00 ? x >> 9 & 1 : a == 0x7c00 ? (n ? 2 : 9) : a >= 0x400 ? (n ? 3 : 8) : a ? (n ? 4 : 7) : n ? 5 : 6; return m >> k & 1; }
static inline u32 fclass64(double f, u32 m) { u64 x = db(f), a = x << 1 >> 1, I = 0x7ffull << 52; u32 n = x >> 63; u32 k = a > I ? x >> 51 & 1 : a == I ? (n ? 2 : 9) : a >= 1ull << 52 ? (n ? 3 : 8) : a ? (n ? 4 : 7) : n ? 5 : 6; return m >> k & 1; }
// ---- bit counting, byte permute
static inline i32 clz32(u32 x) { return x ? __builtin_clz(x) : -1; }
static inline i32 ctz32(u32 x) { return x ? __builtin_ctz(x) : -1; }
static inline i32 cls32(i32 x) { u32 y = x < 0 ? ~x : x; return y ? __builtin_clz(y) : -1; }
static inline u32 brev32(u32 x) { x = x >> 1 & 0x55555555 | (x & 0x55555555) << 1; x = x >> 2 & 0x33333333 | (x & 0x33333333) << 2; x = x >> 4 & 0x0f0f0f0f | (x & 0x0f0f0f0f) << 4; return x >> 24 | x >> 8 & 0xff00 | x << 8 & 0xff0000 | x << 24; }
static inline u64 brev64(u64 x) { return (u64)brev32(x) << 32 | brev32(x >> 32); }
static inline u32 popc32(u32 x) { x -= x >> 1 & 0x55555555; x = (x & 0x33333333) + (x >> 2 & 0x33333333); x = (x + (x >> 4)) & 0x0f0f0f0f; return x * 0x01010101 >> 24; }
static inline u32 vperm(u32 hi, u32 lo, u32 sel) { u64 d = (u64)hi << 32 | lo; u32 r = 0;
  for (int i = 0; i < 4; i++) { u32 s = sel >> 8 * i & 255, b = s > 12 ? 255 : s == 12 ? 0 : s >= 8 ? (d >> (16 * (s - 8) + 15) & 1 ? 255 : 0) : d >> 8 * s & 255; r |= b << 8 * i; } return r; }
static inline u64 bitsel(u64 x, u32 hi, u32 lo) { return x >> lo & (hi - lo >= 63 ? ~0ull : (1ull << (hi - lo + 1)) - 1); }
static inline i64 sext_from(i64 x, u32 n) { return !n ? 0 : n > 63 ? x : (i64)((u64)x << (64 - n)) >> (64 - n); }
// ---- exponent tricks
static inline float ldexp32(float x, i32 n) { n = n < -400 ? -400 : n > 400 ? 400 : n; return (float)((double)x * bd((u64)(n + 1023) << 52)); }
static inline double ldexp64(double x, i32 n) { return ldexp(x, n); }
static inline float ldexp16(float x, i32 n) { n = n < -400 ? -400 : n > 400 ? 400 : n; return rh(oddf((double)x * bd((u64)(n + 1023) << 52))); }
static inline i32 frexp_exp32(float x) { int e = 0; if (x != 0 && x - x == 0) frexp((double)x, &e); return e; }
static inline i32 frexp_exp64(double x) { int e = 0; if (x != 0 && x - x == 0) frexp(x, &e); return e; }
static inline float frexp_mant32(float x) { int e; return x != 0 && x - x == 0 ? (float)frexp((double)x, &e) : x; }
static inline double frexp_mant64(double x) { int e; return x != 0 && x - x == 0 ? frexp(x, &e) : x; }
static inline float fract32(float x) { float r = x - floorf(x); return r >= 1 ? bf(0x3f7fffff) : r; }
static inline double fract64(double x) { double r = x - floor(x); return r >= 1 ? bd(0x3fefffffffffffffull) : r; }
static inline float sin2pi(float x) { return (float)sin(6.283185307179586476925 * ((double)x - rint((double)x))); }   // the argument is in turns
static inline float cos2pi(float x) { return (float)cos(6.283185307179586476925 * ((double)x - rint((double)x))); }
static inline double trig_preop64(double x, u32 seg) {   // 53 bits of 2/pi, far enough down for the exponent of x
  static const u64 P[21] = {0xa2f9836e4e441529, 0xfc2757d1f534ddc0, 0xdb6295993c439041, 0xfe5163abdebbc561, 0xb7246e3a424dd2e0, 0x06492eea09d1921c, 0xfe1deb1cb129a73e, 0xe88235f52ebb4484, 0xe99c7026b45f7e41, 0x3991d639835339f4, 0x9c845f8bbdf9283b, 0x1ff897ffde05980f, 0xef2f118b5a0a6d1f, 0x6d367ecf27cb09b7, 0x4f463f669e5fea2d, 0x7527bac7ebe5f17b, 0x3d0739f78a5292ea, 0x6bfb5fb11f8d5d08, 0x56033046fc7b6bab, 0xf0cfbc209af4361d};
  i32 e = (i32)(db(x) >> 52 & 2047), sh = (seg & 31) * 53 + (e > 1077 ? e - 1077 : 0), k = sh / 64, o = sh % 64; if (k > 19) return 0;
  u64 r = (o ? P[k] << o | P[k + 1] >> (64 - o) : P[k]) >> 11; return ldexp((double)r, -53 - sh + (e >= 1968 ? 128 : 0)); }
// ---- division steps. den(x): a denormal; the quotient is scaled when it, the divisor or the reciprocal would be denormal (or overflow)
#define DIV(n, T, B, X, BIAS, LIM, SC, TINY) \
  static inline int den##n(T x) { return x != 0 && X(x) == 0; } \
  static inline T div_scale##n(T s0, T s1, T s2, u8 *vcc) { *vcc = 0; T inv = 1 / s1, q = s2 / s1; \
    if (s1 == 0 || s2 == 0) return (T)NAN; \
    if (X(s2) - X(s1) >= LIM) { *vcc = 1; return s0 == s1 ? ldexp##n(s0, SC) : s0; } \
    if (den##n(s1)) return ldexp##n(s0, SC); \
    if (den##n(inv) && (den##n(q) || q == 0)) { *vcc = 1; return s0 == s1 ? ldexp##n(s0, -SC) : s0; } \
    if (den##n(inv)) return ldexp##n(s0, -SC); \
    if (den##n(q) || q == 0) { *vcc = 1; return s0 == s2 ? ldexp##n(s0, SC) : s0; } \
    return X(s2) <= TINY ? ldexp##n(s0, SC) : s0; } \
  static inline T div_fixup##n(T q, T d, T m) { T s = copysign((T)1, d) * copysign((T)1, m), a = q < 0 ? -q : q; \
    if (m != m) return m + m; if (d != d) return d + d; int di = d - d != 0, mi = m - m != 0; \
    if ((d == 0 && m == 0) || (di && mi)) return -(T)NAN; if (d == 0 || mi) return s * (T)INFINITY; if (di || m == 0) return s * 0; \
    if (X(q) == X((T)INFINITY)) return s * (T)INFINITY;  /* the approximation overflowed (also to NaN) */ \
    if (X(m) - X(d) < -(BIAS + TINY)) return s * 0; return s * (T)fabs(a); }
#define XP32(x) (i32)(fb(x) >> 23 & 255)
#define XP64(x) (i32)(db(x) >> 52 & 2047)
DIV(32, float, fb, XP32, 127, 96, 64, 23)
DIV(64, double, db, XP64, 1022, 768, 128, 53)
static inline float div_fixup16(float q, float d, float m) { float r = div_fixup32(q, d, m); return r; }
static inline float div_fmas32(float a, float b, float c, u32 vcc) { return !vcc ? fmaf(a, b, c) : (float)(fma((double)a, b, c) * (XP32(c) > 127 ? 0x1p64 : 0x1p-64)); }
static inline double div_fmas64(double a, double b, double c, u32 vcc) { double r = fma(a, b, c); return !vcc ? r : r * (XP64(c) > 1023 ? 0x1p128 : 0x1p-128); }
