export OBJ=/tmp/attv/obj; mkdir -p $OBJ; T=$PWD
c() { n=$1; shift; PYTHONPATH=$G:$T/kernels:$T/python:$BASEPATH python3 $G/comp.py $n "$@"; }
( c queue 64c:d 64c t:d t; c fl 128c:d 192c:d 256c:d t256:d 192c 256c ) &
( c fl 64f:d 128f:d 256f:d 192f:d 256gf:d 256m:d 64f 128f 192f 256f 256gf 256gc 256m 192x ) &
( python3 $G/acc.py x; python3 $G/warmtests.py; c fl 96f 96c 128c 128c16 128f16 ) &
wait
