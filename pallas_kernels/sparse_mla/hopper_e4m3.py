"""e4m3 numbers in shared memory to bf16 ones, 16 a thread."""

from pallas_kernels.simt import Value
from pallas_kernels.sparse_mla import wgmma


def load_shared(address: Value, offset: int) -> list[Value]:
    """Four neighbouring words, `offset` bytes further, as floats."""

    def code(_, words, operands):
        return [f"ld.shared.v4.b32 {{{','.join(words)}}}, [{operands[0]}+{offset}];"]

    return wgmma.statement(code, fresh=4, operands=(address,))


def store_as_bf16(target: Value, offset: int, words, scale: Value, is_odd: Value) -> None:
    """16 e4m3 numbers times a scale to two chunks, `target` and the other one 16 bytes away, `offset` bytes further.

    is_odd: 1 where the target is the second of the two.
    """

    def code(_, __, operands):
        first, second, scale, odd, *words = operands
        lines = [
            ".reg .pred odd; .reg .b16 half<2>, number<2>; .reg .b32 word<4>, both, pair<8>; .reg .f32 x<2>;",
            f"setp.ne.s32 odd, {odd}, 0;",
            *(f"selp.b32 word{i}, {words[i ^ 2]}, {words[i]}, odd;" for i in range(4)),
        ]
        for i in range(4):
            lines.append(f"mov.b32 {{half0, half1}}, word{i};")
            for j in range(2):
                lines.append(f"cvt.rn.f16x2.e4m3x2 both, half{j}; mov.b32 {{number0, number1}}, both;")
                lines += [f"cvt.f32.f16 x{k}, number{k}; mul.f32 x{k}, x{k}, {scale};" for k in range(2)]
                lines.append(f"cvt.rn.bf16x2.f32 pair{2 * i + j}, x1, x0;")
        for i, address in enumerate((first, second)):
            pairs = ", ".join(f"pair{4 * i + k}" for k in range(4))
            lines.append(f"st.shared.v4.b32 [{address}+{offset}], {{{pairs}}};")
        return lines

    wgmma.statement(code, operands=(target, target ^ 16, scale, is_odd, *words))
