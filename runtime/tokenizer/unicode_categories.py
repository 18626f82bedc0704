"""Unicode categories of code points, as the vocabularies' pre-tokenizers mean them.

Owns one table. It is Unicode 15.1, the version that llama.cpp's table has, whatever version the running Python brings:
token ids must not change with the interpreter. Knows nothing of tokens.
"""

from __future__ import annotations

import base64
import functools
import re
import zlib

import numpy as np
from numpy.typing import NDArray

CODE_POINTS = 0x110000

WHITESPACE = (
    *range(0x09, 0x0E),
    0x20,
    0x85,
    0xA0,
    0x1680,
    *range(0x2000, 0x200B),
    0x2028,
    0x2029,
    0x202F,
    0x205F,
    0x3000,
)
"""Code points with the property White_Space."""

# Runs of the major categories L, N, P, S and M in code-point order, "O" for every other: "O33P3S1P3...", in base 85.
_RUNS = (
    "c-"
    "oDaX|k+34urSldDsJBBG~_4`pYz&ckb;W`Uh2%!Lo*wl&Y2Uou7C&u5!h2rzhX(NX@J9iMoyZcICoX<x0n1h)=l^??kr6OW*OzH+$H8WbH0>Jm"
    "rWyE=PU(p*604#+X>()s+s!9&wc|_Q*@WcoO&+k`(iN;>qULSjuDR#dZ{qUFf^wS<vca^O@c&u5qNk3bNCRT}D09GI8*Y^gACVpDD`Za<F>LDJ"
    "{;9QSodnvEk$qZyb56R&+40=5QiA9b+O*x)#5b&w1#S%n}mWlM)gl%kgCKtP9nuOsi+sy)2EZ9;skuTk{-"
    "8;oyQrIUlunR~(0p=g?c)NX>T2OLBz#moV|@b{l5tY#V|kE@?CH2d2n*T9dZ8;%eKhQ|d}y^Gm<vrJoC#O9qrJb7g*a&eECvl5U8$XM;t}wFCK"
    "wsQRilWS_4j@6{u{S{YQBdba(>zgzfQ%#VeubNy+bP;)hDv%%Exj06_G(+4o$YaJgYOskk>G+D29?#Sk6ta?^-c}+4v+m90Q-"
    "P2Di;JxX`q}9oZE_F_2#-BpMAJ+U9)VAM0A-"
    "Y8y!RhmC0qDQCDXnk<QMmf&hG|%BSH>Z8%NrZ1*d4`UXDhm6HJz1CBa^fQHk?ZqA*P?>cDCTL{^LS}xx7E@>?E`!yzWKmXQA>u`jUvTx}2cm)2"
    ">9M&iGw7@Y*hFLRwHVAC)AN4XF8`(WCEl*Qab%l*Zw(YVBzFVP{R2=J)}>V5Rd`FjbMs!@5=LSrnC=H#X9nMf<*dH~;ae6S?;HR}&cXJuygVqM"
    "Qa|IGP?Q(~l-"
    "gmAXc8lkP{acfK+P1NlMV@!Uj6(#;T>I3@3J?_ZTOlIqLtvZ%zBa~(Fy^hSdH&Dj&NRe4#?ZEgoglqosWaMy>b`n_vh*ipltqGW0k%hM<GBfEC"
    "-9A5@$Glkk;XLnU(xd1>-lBH1LJC<d|1^9<^K2xQbz)(J8-i5WGMOlLqoZBha-Bt2<$135bLuM3ZRlWy>EDICph)vCK%R7`aoef3%*dE_qLO0_"
    ">=X+(NQ*L!uKD#c^A$A;>R>*mu=m+W_caoMngl>#lyqrc<QFTl?LpM4l%WG_=%Ii~AR!vaf;XSiH?dyfUlwwhDl&A90*?d*(yVy>ca&I@-"
    "ooZo~+$M)On-UkEKCVP6MF3E)9G;?=GCFb_(1>T5y#R;hUeqy@np~jnrimU(n6#?;|NU2X)Fy1I9LV7mt?3;2AC~}Hv?rsf{FG7KsY}^mNlldO"
    "Xlr8_6i89MiNW*42+U7pMH0_Y3lOZ5(w0Y4-LIfrag!-31sA>pE0~2)`;&;owF45aA!bss*}vz$4@avL$AFj=N#gv}ifyHt`%I-"
    "+bC+Da3YLqyq|VN&NIkgY0r>Hxd`t&c9HB|Ie`;eY>eOmV8?Z{Fha0k@J%t>t_zFzpXHsGaVa_JC{N^-w-"
    "M1ox`kN#{6~PbYQgu_Jp`9zdHkaEK6NR*`?nV(+TcpMK8cGuD$<MBo)m_phGr43$R}9oQvg!N6g-TF3-iju+@)P#rYE%SN-mdBt-"
    "#MT>#_r;k)T7H>qg13d35kKeJS0P<r|xr|BKd7D@fQn;fmrfxW4HNSlf&6b%Tygp;+eP?4B3ge5D{d>?l;Sv^_G&B%)|13b6*M^0M5V6S9!>f="
    "pq-vmpRr{95v2Q=c;vjpGa^f$#B9|AR5oSDq8o;1om;wpmz4BR5jxq9ANnihsMiX77QzpiO?S7QjX?v%5T(eGiMPvwP`F<gBo89{J<Y2K#VCMh"
    "ER-K!+)sN-z$w4%Gxvm3!-"
    "C1B@&iu9?_;9;g(olMrHD2XJ11QOQIuC&}*(TKF8Ec#Rr1sX`$g4_*PN5VW3b^K<ri8u{#>?3+W$qn&x~28j<~0e@OIQr^J;7gQ3s~>gB3;M|%"
    "*GiC_{atwYrpeV6o$D7Z#AI?<u@%J=&0m)u5E9!{4@X^pSp=11bCy((v>63z35hKsA*ggm*SBOP>8rMt?As;82TJd{?d)ox(&-"
    ";{kKI%*(yF#?zpOs#=(mMWm=9aqf!I54y0-rKX;n#P^tV&(4Y7=ySdRuWACJ$pn-*SRTW`%P-"
    "z(5uh^8dVlW${LjaPR2hT`jPREJ6DyGCH^S(zzk>8nQ+|WZK#K-"
    "1=dks9`YP$hcoI)0ZFBuVcn@tVk5f;tQcR?gLzXVFuGoDK2pU5#860t3u{%MP<T`mj_NUmQpPhiB^wrBs^ApfoLI`2U6Tko(KDTQ794q6x4wNW"
    "BBrrLj3#K27!1##Q4?a>#fW$12O+JiL?r-jHs3uFjr}}aN_-VuQ*q&q$oKr?adN(yxtkRFwAX3Px#@S(S>NaNozPYmA^;km?_Z5KyDU3IxKgi;"
    "=9%nDv{tlp*LC&-"
    "DV2xY95GHZv}FwFiX^rLRr$7Q8Ey~iJ|iPelWbF#zD?OJs?YWERGYa&qVRSxd;KGzzZZg`aM|+B@>Ux|flFDb8wjgrQiXs9-"
    "p%$^NYWdXXdh6sBGqrG1P_%)n$XPEi2oULrzcSYIo}yh*`y?sr8x{)C>1m<${Gdm*|nhbK-QV3fD)J)+!;<&G=D-"
    "lc&`OIe<p6U@dwyIOc+I)DBRP?Zy8HHRGPk@&!BK!Nq}MWbVc61@EtEbQN`VI;%i5%?=&(#!^WG}_5E|8JKkdY$$!4o?|+*A<4)bAhNm)xR?!&"
    "lHI9iHY93Rc66RDwVknBX@R%6CL<^(S<-;V7Y$UW%tVvUocSk$-"
    "t3Aq!q^Uwew3W5Rd94<y@Q(evmtDTfKiyW)lpN(}!6icpvdW9Q)d#JI5M8*OX4)Ig*aVR(vRh30>4k4+^Z5NU<BHKp!`~Cd-"
    "y8nAzGolY%5QlR9tEr)#>0;!I?>_pMH5;u9>gT{5%)*#P7llgMYZi*-"
    "5Wrsm~+vjT=_XHMI?8#46=yTy5K!~0@OsVyDCDfq<lmZ9%beumpy`v|HG3ClA$96Z@ACU@;+2oETTjtV|LMj7n9bhYqrxwT}6A78ZonTb8hz1H"
    "6;Ovq>>0LR+FuP1~5q;(v;zD^_T+XB}tRn0L{Muv_BBi"
)


@functools.cache
def categories() -> NDArray[np.uint8]:
    """(0x110000,) uint8: ASCII code of L, N, P, S or M, the major category of each code point, or of O (other)."""
    runs = re.findall(r"([A-Z])(\d+)", zlib.decompress(base64.b85decode(_RUNS)).decode())
    letters = np.array([ord(letter) for letter, _ in runs], dtype=np.uint8)
    table = np.repeat(letters, [int(length) for _, length in runs])
    assert table.size == CODE_POINTS
    table.flags.writeable = False
    return table
