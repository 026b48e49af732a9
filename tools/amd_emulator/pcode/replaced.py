"""Own text for instructions whose pseudo-code is a loop, approximate, or unlike the hardware."""

from __future__ import annotations

REPLACE: dict[str, str] = {}

for _t in ("f32", "f64", "f16"):
    _T = _t.upper()
    for _n in ("FLOOR", "CEIL", "TRUNC"):
        REPLACE[f"V_{_n}_{_T}"] = REPLACE[f"S_{_n}_{_T}"] = f"D0.{_t} = {_n.lower()}(S0.{_t})"
    REPLACE[f"V_RNDNE_{_T}"] = REPLACE[f"S_RNDNE_{_T}"] = f"D0.{_t} = rint(S0.{_t})"
    REPLACE[f"V_FRACT_{_T}"] = f"D0.{_t} = fract(S0.{_t})"
    REPLACE[f"V_FREXP_MANT_{_T}"] = f"D0.{_t} = frexp_mant(S0.{_t})"
    REPLACE[f"V_LDEXP_{_T}"] = f"D0.{_t} = ldexp(S0.{_t}, {'''32'I(S1.i16)''' if _t == 'f16' else 'S1.i32'})"
    REPLACE[f"V_FREXP_EXP_I32_{_T}"] = f"D0.i32 = frexp_exp(S0.{_t})"
    for _n in ("MIN", "MAX"):
        REPLACE[f"V_{_n}_{_T}"] = REPLACE[f"S_{_n}_{_T}"] = f"D0.{_t} = v_{_n.lower()}_{_t}(S0.{_t}, S1.{_t})"
        REPLACE[f"V_{_n}_NUM_{_T}"] = REPLACE[f"S_{_n}_NUM_{_T}"] = (
            f"D0.{_t} = v_{_n.lower()}_num_{_t}(S0.{_t}, S1.{_t})"
        )
        REPLACE[f"V_{_n}IMUM_{_T}"] = REPLACE[f"S_{_n}IMUM_{_T}"] = (
            f"D0.{_t} = v_{_n.lower()}imum_{_t}(S0.{_t}, S1.{_t})"
        )
    for _x in ("", "X"):
        REPLACE[f"V_CMP{_x}_CLASS_{_T}"] = f"D0.u64[laneId] = fclass(S0.{_t}, S1.u32)"
    if _t != "f16":
        REPLACE |= {
            f"V_DIV_SCALE_{_T}": f"D0.{_t} = div_scale(S0.{_t}, S1.{_t}, S2.{_t})",
            f"V_DIV_FMAS_{_T}": f"D0.{_t} = div_fmas(S0.{_t}, S1.{_t}, S2.{_t}, VCC.u64[laneId])",
        }
    REPLACE[f"V_DIV_FIXUP_{_T}"] = f"D0.{_t} = div_fixup(S0.{_t}, S1.{_t}, S2.{_t})"
    if _t != "f64":
        REPLACE |= {f"V_SIN_{_T}": f"D0.{_t} = sin2pi(S0.{_t})", f"V_COS_{_T}": f"D0.{_t} = cos2pi(S0.{_t})"}
REPLACE |= {
    "V_FREXP_EXP_I16_F16": "D0.i16 = 16'I(frexp_exp(S0.f16))",
    "V_FFBH_U32": "D0.i32 = clz(S0.u32)",
    "V_FFBL_B32": "D0.i32 = ctz(S0.u32)",
    "V_FFBH_I32": "D0.i32 = cls(S0.i32)",
    "V_CLZ_I32_U32": "D0.i32 = clz(S0.u32)",
    "V_CTZ_I32_B32": "D0.i32 = ctz(S0.u32)",
    "V_CLS_I32": "D0.i32 = cls(S0.i32)",
    "V_BCNT_U32_B32": "D0.u32 = S1.u32 + popc(S0.u32)",
    "V_MBCNT_LO_U32_B32": "D0.u32 = S1.u32 + popc(S0.u32 & lanes_lo)",
    "V_MBCNT_HI_U32_B32": "D0.u32 = S1.u32 + popc(S0.u32 & lanes_hi)",
    "V_PERM_B32": "D0.u32 = vperm(S0.u32, S1.u32, S2.u32)",
    "S_BCNT1_I32_B32": "D0.u32 = popc(S0.u32);\nSCC = D0.u32 != 0U",
    "S_BCNT1_I32_B64": "D0.u32 = popc(S0.u64);\nSCC = D0.u32 != 0U",
    "S_GETREG_B32": "D0.u32 = 0U",
    "S_BCNT0_I32_B32": "D0.u32 = popc(~S0.u32);\nSCC = D0.u32 != 0U",
    "S_BCNT0_I32_B64": "D0.u32 = popc(~S0.u64);\nSCC = D0.u32 != 0U",
}
REPLACE["V_TRIG_PREOP_F64"] = "D0.f64 = trig_preop(S0.f64, S1.u32)"
REPLACE["V_FMAC_DX9_ZERO_F32"] = "D0.f32 = S0.f32 == 0.0F || S1.f32 == 0.0F ? D0.f32 : fma(S0.f32, S1.f32, D0.f32)"
for _n in ("V_MAD_U64_U32", "V_MAD_CO_U64_U32"):
    REPLACE[_n] = "D0.u64 = 64'U(S0.u32) * 64'U(S1.u32) + S2.u64;\nVCC.u64[laneId] = D0.u64 < S2.u64"
