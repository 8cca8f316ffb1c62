import bench, os
os.environ["CHECK"] = "0"
print(list(bench.build("t=queue,queue:d")), list(bench.build("t256=fl:d")))
