while [ ! -e $O/warm.done ]; do sleep 0.5; done
tail -1 $O/warm.txt
export TREE=$PWD
timeout 46 python3 -u $G/x.py go 2>&1
sleep 1
cat $O/trial_*.txt | grep -v "on CPU\|dequantised" | cut -c1-500
