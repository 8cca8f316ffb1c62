rm -rf cubin; mkdir cubin
c() { n=$1; shift; nvcc -std=c++17 -O3 -cubin -arch=sm_90a -Xptxas -v "$@" loop.cu -o cubin/$n.cubin 2> cubin/$n.err; grep -E "error|Potential|spill|registers" cubin/$n.err | sed "s/^/$n: /" | grep -v " 0 bytes spill stores" ; }
c base & c nofill -DFILL=0 & c skew150 -DSKEW=150 & c skew300 -DSKEW=300 & c skew450 -DSKEW=450 & c skew300-nofill -DSKEW=300 -DFILL=0 & wait
for t in 1 2 3 4 5; do c turns$t -DTURNS=$t & done; c turns4-nofill -DTURNS=4 -DFILL=0 & wait
c areg -DAREG=1 & c areg-nofill -DAREG=1 -DFILL=0 & c areg-turns4 -DAREG=1 -DTURNS=4   & wait
c three -DWGS=3 -DCOLS=128 & c three-nofill -DWGS=3 -DCOLS=128 -DFILL=0 & c three-areg -DWGS=3 -DCOLS=128 -DAREG=1 & c tile -DTILE=2000  & c turns4-tile -DTURNS=4 -DTILE=2000 & wait
for s in 64 128 192 256; do c skew$s-nofill -DSKEW=$s -DFILL=0 & done; wait
for t in 1 2 3 5; do c turns$t-nofill -DTURNS=$t -DFILL=0 & done; c areg-turns4-nofill -DAREG=1 -DTURNS=4 -DFILL=0 & c areg-turns3 -DAREG=1 -DTURNS=3 & wait
