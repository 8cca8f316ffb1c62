export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 FLASH_ATTENTION_CUTE_DSL_CACHE_DIR=/tmp/attfwd_fa
for i in 0 1 2; do python3 -W ignore $G/rowsC.py warm $i 3 > $O/warm$i.txt 2>&1 & done
wait
touch $O/warm.done
