export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 FLASH_ATTENTION_CUTE_DSL_CACHE_DIR=/tmp/attfwd_fa
while [ ! -e $O/warm.done ]; do sleep 0.5; done
cat $O/warm?.txt | grep WARM
python3 -W ignore $G/rowsC.py run 25 2>&1
timeout 20 compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 7 python3 -W ignore $G/memcC.py > $O/memc.txt 2>&1; head -n 12 $O/memc.txt; tail -n 2 $O/memc.txt
timeout 36 python3 -W ignore -m pytest -q -m gpu test/gpu/test_sdpa.py -x 2>&1 | tail -4
