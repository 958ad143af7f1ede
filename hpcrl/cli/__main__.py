from hpcrl.cli import main

main()
