while [ ! -e $O/warm.done ]; do sleep 0.5; done
export OBJ=/tmp/attv/obj; T=$PWD; TP=$PYTHONPATH; export PYTHONPATH=$G:$PYTHONPATH; cd $G; touch $O/go
CHECK=0 REPS=1 timeout 45 python3 bench.py 256f=fl,fl:d,cudnn 256gf=fl,fl:d,cudnn 256gc=fl,cudnn 256m=fl,fl:d,cudnn 256c=fl,fl:d,cudnn 64f=fl,fl:d,fa4 128f=fl,fl:d,fa4 192f=fl,fl:d,fa4 192c=fl,fl:d,fa4,cudnn 64c=queue,queue:d,fa4 2>&1 | grep -v Warn
timeout 25 python3 det.py queue_64c fl_256c fl_192c fl_128c
timeout 20 python3 acc.py
CHECK=0 timeout 30 compute-sanitizer --tool memcheck python3 memc.py 2>&1 | tail -3
(cd $T; PYTHONPATH=$TP timeout 40 python3 -m pytest -q -x -m gpu -p no:cacheprovider test/gpu/test_sdpa.py -k "deterministic_gradients" 2>&1 | tail -4)
