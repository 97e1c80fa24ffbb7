MODEL_ARGS=(
   --swiglu
   --num-layers 4
   --hidden-size 64
   --disable-bias-linear
   --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
)
