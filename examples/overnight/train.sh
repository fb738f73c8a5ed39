# Stands for a trainer: a step a second, a checkpoint for each, from where it was left.
step=0
if [ -n "${PACELINE_RESUME_FROM:-}" ]; then
  step=$(cat "$PACELINE_RESUME_FROM"/checkpoints/step-*/step | sort -n | tail -n 1)
fi
echo "going on from step $step"
while [ "$step" -lt "${STEPS:-1000000}" ]; do
  step=$((step + 1))
  # Written under another name first: what is there is whole.
  mkdir -p "checkpoints/step-$step.tmp"
  echo "$step" > "checkpoints/step-$step.tmp/step"
  mv "checkpoints/step-$step.tmp" "checkpoints/step-$step"
  echo "step $step"
  sleep 1
done
